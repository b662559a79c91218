"""Where the time of a run went, and the rules by which a change is named."""

import json
import re

import pytest
from fake_run import FakeRun
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.core.phases import PHASES
from manyhands.core.records import PhaseMetrics, append
from manyhands.report.read import read_run
from manyhands.report.time_shares import best_change, samples_by_rank, seconds_by_rank, time_fractions, unequal_line

# A run that only computes.
SOUND = {"compute": 90.0, "update": 4.0, "records": 1.0}


def tell(run, *ranks, epoch=1, **more):
    seconds = {phase: [rank.get(phase, 0.0) for rank in ranks] for phase in PHASES}
    append(run.folder.metrics, PhaseMetrics(time=run.time, epoch=epoch, step=100 * epoch, seconds=seconds, **more))


def change(path, *ranks, **train):
    run = FakeRun(path).begin(**train)
    tell(run, *ranks)
    return best_change(read_run(path))


@pytest.mark.parametrize(
    ("ranks", "words", "gain"),
    [
        ([SOUND], "computation takes", 0),
        ([{"compute": 60, "communication": 40}] * 2, "use --batch 128 to halve the number of updates", 0.2),
        # A third and less isn't worth it.
        ([{"compute": 70, "communication": 30}] * 2, "computation takes", 0),
        # Who is waited for waits least: agreeing itself takes no time here.
        (
            [{"compute": 50, "communication": 50}, {"compute": 100}],
            "rank 1 takes 2.00 times as long as the other ranks, which wait: use --set cluster.shares=[43,21]",
            0.5,
        ),
        ([{"compute": 50, "data": 50}] * 2, "waiting for data takes 50%", 0.5),
        ([{"compute": 50, "evaluation": 50}], "train.evaluate_every=2 ", 0.25),
        ([{"compute": 70, "saving": 30}], "checkpoint.every", 0.15),
        ([{"compute": 40, "update": 30, "records": 20, "other": 10}], "--batch 128", 0.3),
    ],
)
def test_the_change_that_saves_most_is_named(tmp_path, ranks, words, gain):
    found = change(tmp_path, *ranks, batch=64)
    assert words in found.what
    assert found.gain == pytest.approx(gain)


def with_option(run, before, after):
    """Another value in the run's job."""
    text = run.folder.job.read_text()
    assert before in text
    run.folder.job.write_text(text.replace(before, after))
    return run


@pytest.mark.parametrize(
    ("ranks", "queued_s", "words", "gain"),
    [
        # Other ways of agreeing are for several machines.
        ([{"compute": 60, "communication": 40}] * 2, None, "--sync auto", 0.4),
        # The load of other programs is no communication.
        ([{"compute": 47, "communication": 53}] * 2, [40, 36], "wait for a free CPU core 38% of the time", 0.38),
        ([{"compute": 50, "communication": 50}, {"compute": 100}], None, "rank 1 on n2", 0.5),
    ],
)
def test_the_change_on_two_machines(tmp_path, ranks, queued_s, words, gain):
    run = FakeRun(tmp_path).begin()
    assert best_change(read_run(tmp_path)) is None
    told = json.loads(run.folder.environment.read_text())
    run.folder.environment.write_text(json.dumps({**told, "ranks": [{"host": "n1"}, {"host": "n2"}]}))
    tell(run, *ranks, **({"queued_s": queued_s} if queued_s else {}))
    found = best_change(read_run(tmp_path))
    assert words in found.what
    assert found.gain == pytest.approx(gain)


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_is_to_be_packed_unless_it_is(tmp_path, packed):
    pets = tmp_path / "my pets"
    pets.mkdir()
    if packed:
        (tmp_path / "my pets.pack").mkdir()
    run = with_option(FakeRun(tmp_path / "run").begin(), '"cifar10"', f'"{pets}"')
    tell(run, {"compute": 50, "data": 50})
    assert (f"manyhands pack '{pets}'" in best_change(read_run(run.path)).what) != packed


SLOW_RANK = [{"compute": 50, "communication": 50}, {"compute": 100}]


@pytest.mark.parametrize(
    ("before", "after", "ranks", "words"),
    [
        ("\nworkers = -1", "\nworkers = 0", [{"compute": 50, "data": 50}], "data.workers=-1"),
        ('"allreduce"', '"powersgd"', SLOW_RANK[:1] * 2, "use --batch 128 to halve the number of updates"),
        ('shares = "machines"', "shares = [48, 16]", SLOW_RANK, "programs on its machine, or remove the machine"),
    ],
)
def test_the_change_depends_on_an_option_of_the_job(before, after, ranks, words, tmp_path):
    tell(with_option(FakeRun(tmp_path).begin(batch=64), before, after), *ranks)
    assert words in best_change(read_run(tmp_path)).what


def test_records_add_up_since_the_number_of_processes_is_as_it_is(tmp_path):
    run = FakeRun(tmp_path).begin()
    for ranks in (3, 2, 2):
        tell(run, *[{"compute": 10.0 * (rank + 1)} for rank in range(ranks)])
    assert [one["compute"] for one in seconds_by_rank(read_run(tmp_path))] == [20, 40]


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=8, max_size=8), min_size=1, max_size=5))
def test_whatever_was_measured_the_gain_is_a_share(tmp_path_factory, ranks):
    named = [dict(zip(PHASES, rank, strict=True)) for rank in ranks]
    found = change(tmp_path_factory.mktemp("run"), *named)
    if found is None:
        assert not any(sum(rank) for rank in ranks)
    else:
        assert 0 <= found.gain <= 1
        assert found.what
    assert all(sum(time_fractions(one).values()) == pytest.approx(1) for one in named if sum(one.values()))


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=8), st.integers(8, 4096))
@example([1.0, 1.001, *[100.0] * 6], 8)
def test_suiting_shares_make_up_the_batch(tmp_path_factory, own_s, batch):
    longest = max(own_s)
    ranks = [{"compute": one, "communication": longest - one} for one in own_s]
    found = change(tmp_path_factory.mktemp("run"), *ranks, batch=batch)
    shares = re.search(r"cluster.shares=\[([\d,]+)\]", found.what)
    if shares:
        numbers = [int(one) for one in shares[1].split(",")]
        assert len(numbers) == len(own_s)
        assert sum(numbers) == batch
        assert min(numbers) >= 1


def test_what_each_takes_of_an_update_is_said_where_it_is_not_the_same(tmp_path):
    run = FakeRun(tmp_path).begin()
    assert unequal_line(read_run(tmp_path)) == ""
    plan = json.loads(run.folder.plan.read_text())
    for passes, taken, line in (
        ([[16, 16]], [16, 16], ""),
        ([[17, 16]], [17, 16], ""),
        ([[12, 4], [1112, 4]], [1124, 8], "shares of the batch of 1,132 samples, by process: 1,124, 8"),
    ):
        run.folder.plan.write_text(json.dumps({**plan, "shares": passes}))
        assert samples_by_rank(read_run(tmp_path)) == taken
        assert unequal_line(read_run(tmp_path)) == line
    run.event("shares", shares=[20, 12], step=100)
    assert samples_by_rank(read_run(tmp_path)) == [20, 12]
    run.event("shares", shares="spoilt", step=100)
    assert samples_by_rank(read_run(tmp_path)) == [20, 12]
    # What a later start began with is in plan.json.
    run.resume(100)
    assert samples_by_rank(read_run(tmp_path)) == [1124, 8]
