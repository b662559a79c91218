"""A run folder can be read in whatever state it is; where its time went, and the rules by which a change is named."""

import itertools
import json
import math
import re

import pytest
from fake_run import FakeRun, step_record
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.phases import PHASES
from manyhands.core.records import EvaluationMetrics, Event, PhaseMetrics, StepMetrics, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.report.follow import Follower, Tail
from manyhands.report.read import read_run, sessions, without_repeats
from manyhands.report.time_shares import best_change, samples_by_rank, seconds_by_rank, time_fractions, unequal_line
from manyhands.run.outcome import explain_run
from manyhands.train.journal import Journal
from manyhands.train.saver import count_earlier_failures
from manyhands.worker.run_metadata import record_undone_steps

# Each session begins at or before what the one before it reached, and makes so many records.
PLANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)), min_size=1, max_size=5)


@given(PLANS)
def test_the_later_record_wins(plan):
    time, reached, records, events, expected = 0.0, 0, [], [], {}
    for back, count in plan:
        begin = max(0, reached - back)
        time += 100
        events.append(Event(time=time, kind="resumed", step=begin))
        expected = {number: loss for number, loss in expected.items() if number <= begin}
        for number in range(begin + 1, begin + count + 1):
            time += 1
            records.append(step_record(number, time, loss=time))
            expected[number] = time
        reached = begin + count
    kept = without_repeats(records, events)
    assert {record.step: record.loss for record in kept} == expected
    assert [record.step for record in kept] == sorted(expected)
    silent = without_repeats(records, [])  # no event of a restart: what repeats a step replaces all from it on
    assert [record.step for record in silent] == sorted({record.step for record in silent})
    thinned = without_repeats(records, [], 4)
    for found in (silent, thinned):
        assert [record.step for record in found[-1:]] == [record.step for record in records[-1:]]
    assert sum(record.samples for record in thinned) <= sum(record.samples for record in silent)


def test_what_was_undone_is_counted_by_nobody(tmp_path):
    run = FakeRun(tmp_path / "run").begin().train(0, 120)
    found = read_run(run.path)
    for time, kind, at in ((0, "left-out", 30), (1, "left-out", 90), (2, "undone", 60), (3, "left-out", 70)):
        event = Event(time=found.steps[-1].time + 1 + time, kind=kind, step=at)
        append(run.folder.events, event)
    undone = read_run(run.path)
    assert undone.steps[-1].step <= 60 < found.steps[-1].step
    assert [event.step for event in undone.counted("left-out")] == [30, 70]


def test_undone_steps_of_an_earlier_start_are_recorded_once(tmp_path):
    folder = FakeRun(tmp_path / "run").begin().train(0, 120).folder
    newest = read_run(folder.path).steps[-1]

    def goes_on(time, step):
        append(folder.events, Event(time=newest.time + time, kind="resumed", step=step))
        record_undone_steps(folder, Journal(folder, 0), step)
        return [line["data"] for line in read_lines(folder.events) if line["kind"] == "undone"]

    assert goes_on(10, 60) == [{"first": 61, "last": newest.step}]
    # This start is lost before a record of its own, with all that it made saved.
    assert goes_on(20, 80) == [{"first": 61, "last": newest.step}]


@settings(max_examples=60)
@given(cut=st.integers(0, 3500), junk=st.binary(max_size=40))
def test_truncated_file_yields_its_complete_lines(tmp_path_factory, cut, junk):
    run = FakeRun(tmp_path_factory.mktemp("run")).begin().train(0, 120)
    text = run.folder.metrics.read_bytes()[:cut]
    run.folder.metrics.write_bytes(text + b"\n" + junk.replace(b"{", b"") + b'\n{"kind": "st')
    read = read_run(run.path)
    assert len(read.steps) + len(read.evaluations) == sum(line.endswith(b"}") for line in text.split(b"\n"))


@pytest.mark.parametrize("bad", ['"soon"', '"nan"', '"inf"', "null", "[1]", "{}"])
def test_a_record_whose_time_is_no_number_is_left_out_by_all_who_read_it(tmp_path, bad):
    run = FakeRun(tmp_path / "run").begin().train(0, 120)
    before, reported = read_run(run.path), explain_run(read_run(run.path)).lines()
    for file in (run.folder.events, run.folder.metrics):
        *_, last = file.read_text().splitlines()
        with file.open("a") as lines:
            lines.write(re.sub(r'"time": ?[\d.e+]+', f'"time": {bad}', last) + "\n")
        assert file.read_text().count(f'"time": {bad}') == 1
        assert all(isinstance(line["time"], float) for line in Tail(file).poll())
    found = read_run(run.path)
    assert (found.events, found.steps) == (before.events, before.steps)
    assert explain_run(found).lines() == reported
    assert math.isfinite(count_earlier_failures(run.folder)[1])


def test_what_is_read_of_a_folder_that_is_no_run_of_a_newer_one_and_of_one_that_is_damaged_elsewhere(tmp_path):
    run = FakeRun(tmp_path / "runs" / "mine").begin()
    with pytest.raises(UserError, match="mine"):
        read_run(tmp_path / "runs")
    with pytest.raises(UserError, match="there is no folder"):
        read_run(tmp_path / "nowhere")
    plan = json.loads(run.folder.plan.read_text())
    run.folder.plan.write_text(json.dumps({**plan, "norm_group": None, "layout": {}}))
    run.folder.metrics.write_text(step_record(1, 1.0, loss=math.nan).model_dump_json() + "\n")
    assert read_run(run.path).plan.exceptions == plan["exceptions"]
    assert math.isnan(read_run(run.path).steps[0].loss)
    run.folder.metrics.write_text('{"v": 2, "kind": "step", "time": 0}\n')
    with pytest.raises(UserError, match="newer manyhands"):
        read_run(run.path)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(["started", "resumed", "saved"])), max_size=20))
def test_sessions_cover_no_more_than_the_run(entries):
    found = sessions([], [Event(time=time, kind=kind) for time, kind in entries])
    assert sum(part.seconds for part in found) <= 1e6
    assert all(before.end <= after.start for before, after in itertools.pairwise(found))


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 900), max_size=30))
def test_following_in_pieces_gives_the_whole(tmp_path_factory, sizes):
    source = FakeRun(tmp_path_factory.mktemp("run")).begin().train(0, 110)
    text = source.folder.metrics.read_bytes()
    target = RunFolder(tmp_path_factory.mktemp("copy"))
    follower, found = Follower(target.path), []
    assert follower.poll() == []
    for size in [*sizes, len(text)]:
        with target.metrics.open("ab") as file:
            file.write(text[:size])
        text = text[size:]
        found += follower.poll()
    whole = read_run(source.path)
    assert [r for r in found if isinstance(r, StepMetrics)] == whole.steps
    assert [r for r in found if isinstance(r, EvaluationMetrics)] == whole.evaluations


def test_a_file_that_was_begun_anew_is_read_again(tmp_path):
    tail = Tail(tmp_path / "x.jsonl")
    tail.path.write_text('{"a": 1}\n{"a": 2}\n')
    assert len(tail.poll()) == 2
    tail.path.write_text('{"a": 3}\n')
    assert tail.poll() == [{"a": 3}]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 9), st.floats(1, 1e6)), max_size=80), st.sampled_from([2, 4, 8])
)
def test_thinned_records_are_few_and_tell_the_same_of_all_samples(found, most):
    records = [
        step_record(number, float(number)).model_copy(update={"samples": samples, "loss": loss, "images_per_s": rate})
        for number, (samples, loss, rate) in enumerate(found, 1)
    ]
    thinned = without_repeats(records, [], most)
    assert len(thinned) <= most
    assert [record.step for record in thinned] == sorted({record.step for record in thinned})
    assert [record.step for record in thinned[-1:]] == [record.step for record in records[-1:]]
    for reported in (
        lambda record: record.samples,
        lambda record: record.samples * record.loss,
        lambda record: record.samples / record.images_per_s,
    ):
        assert math.fsum(map(reported, thinned)) == pytest.approx(math.fsum(map(reported, records)))
    if len(records) < most:
        assert thinned == records


def tell(run, *ranks, epoch=1, **more):
    seconds = {phase: [rank.get(phase, 0.0) for rank in ranks] for phase in PHASES}
    append(run.folder.metrics, PhaseMetrics(time=run.time, epoch=epoch, step=100 * epoch, seconds=seconds, **more))


def change(path, *ranks, **train):
    tell(FakeRun(path).begin(**train), *ranks)
    return best_change(read_run(path))


WAITING, SLOW_RANK = {"compute": 60, "communication": 40}, [{"compute": 50, "communication": 50}, {"compute": 100}]
CHANGES = [
    # machines, an option of the job and its other value, seconds of each rank and in the queue, words, gain
    (1, "", [{"compute": 90, "update": 4, "records": 1}], [], "computation takes", 0),
    (1, "", [WAITING] * 2, [], "use --batch 128 to halve the number of updates", 0.2),
    # A third and less isn't worth it.
    (1, "", [{"compute": 70, "communication": 30}] * 2, [], "computation takes", 0),
    # Who is waited for waits least: agreeing itself takes no time here.
    (1, "", SLOW_RANK, [], "rank 1 takes 2.00 times as long as the other ranks, which wait: use "
                           "--set cluster.shares=[43,21]", 0.5),
    (1, "", [{"compute": 50, "data": 50}] * 2, [], "waiting for data takes 50%", 0.5),
    (1, "", [{"compute": 50, "evaluation": 50}], [], "train.evaluate_every=2 ", 0.25),
    (1, "", [{"compute": 70, "saving": 30}], [], "checkpoint.every", 0.15),
    (1, "", [{"compute": 40, "update": 30, "records": 20, "other": 10}], [], "--batch 128", 0.3),
    # Other ways of agreeing are for several machines.
    (2, "", [WAITING] * 2, [], "--sync auto", 0.4),
    # The load of other programs is no communication.
    (2, "", [{"compute": 47, "communication": 53}] * 2, [40, 36], "wait for a free CPU core 38% of the time", 0.38),
    (2, "", SLOW_RANK, [], "rank 1 on n2", 0.5),
    (1, "\nworkers = -1|\nworkers = 0", [{"compute": 50, "data": 50}], [], "data.workers=-1", 0.5),
    (2, '"allreduce"|"powersgd"', [WAITING] * 2, [], "use --batch 128 to halve the number of updates", 0.2),
    (1, 'shares = "machines"|shares = [48, 16]', SLOW_RANK, [], "programs on its machine, or remove the machine", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("machines", "option", "ranks", "queued_s", "words", "gain"), CHANGES)
def test_the_change_that_saves_most_is_named(tmp_path, machines, option, ranks, queued_s, words, gain):
    run = FakeRun(tmp_path).begin(batch=64)
    assert best_change(read_run(tmp_path)) is None
    before, _, after = option.partition("|")
    job = run.folder.job.read_text()
    assert before in job
    run.folder.job.write_text(job.replace(before, after))
    if machines == 2:
        environment = json.loads(run.folder.environment.read_text())
        run.folder.environment.write_text(json.dumps({**environment, "ranks": [{"host": "n1"}, {"host": "n2"}]}))
    tell(run, *ranks, queued_s=queued_s)
    found = best_change(read_run(tmp_path))
    assert words in found.what
    assert found.gain == pytest.approx(gain)


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_is_to_be_packed_unless_it_is(tmp_path, packed):
    pets = tmp_path / "my pets"
    pets.mkdir()
    if packed:
        (tmp_path / "my pets.pack").mkdir()
    run = FakeRun(tmp_path / "run").begin()
    run.folder.job.write_text(run.folder.job.read_text().replace('"cifar10"', f'"{pets}"'))
    tell(run, {"compute": 50, "data": 50})
    assert (f"manyhands pack '{pets}'" in best_change(read_run(run.path)).what) != packed


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
