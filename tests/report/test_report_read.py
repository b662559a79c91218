"""A run folder can be read in whatever state it is."""

import itertools
import json
import math
import re
import tracemalloc

import pytest
from fake_run import FakeRun, complete, step_record
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics, append
from manyhands.core.run_folder import RunFolder
from manyhands.report.follow import Follower, Tail
from manyhands.report.read import read_run, sessions, without_repeats
from manyhands.run.outcome import explained
from manyhands.train.saver import seen_failures

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


def test_what_was_undone_is_counted_by_nobody(tmp_path):
    run = FakeRun(tmp_path / "run").begin().train(0, 120)
    found = read_run(run.path)
    for time, kind, at in ((0, "left-out", 30), (1, "left-out", 90), (2, "undone", 60), (3, "left-out", 70)):
        event = Event(time=found.steps[-1].time + 1 + time, kind=kind, step=at)
        append(run.folder.events, event)
    undone = read_run(run.path)
    assert undone.steps[-1].step <= 60 < found.steps[-1].step
    assert [event.step for event in undone.counted("left-out")] == [30, 70]


@given(PLANS)
def test_steps_increase_even_without_an_event_of_a_restart(plan):
    records = [step_record(begin + number, 0.0) for begin, count in plan for number in range(count)]
    kept = [record.step for record in without_repeats(records, [])]
    assert kept == sorted(set(kept))
    assert kept[-1:] == [records[-1].step] if records else kept == []


@settings(max_examples=60)
@given(cut=st.integers(0, 4000), junk=st.binary(max_size=40))
def test_truncated_file_yields_its_complete_lines(tmp_path_factory, cut, junk):
    run = FakeRun(tmp_path_factory.mktemp("run")).begin().train(0, 120)
    text = run.folder.metrics.read_bytes()[:cut]
    run.folder.metrics.write_bytes(text + b"\n" + junk.replace(b"{", b"") + b'\n{"kind": "st')
    read = read_run(run.path)
    assert len(read.steps) + len(read.evaluations) == sum(line.endswith(b"}") for line in text.split(b"\n"))


def test_nan_survives_json(tmp_path):
    run = FakeRun(tmp_path).begin()
    with run.folder.metrics.open("w") as file:
        file.write(step_record(1, 1.0, loss=math.nan).model_dump_json() + "\n")
    assert math.isnan(read_run(tmp_path).steps[0].loss)


@pytest.mark.parametrize("bad", ['"soon"', '"nan"', '"inf"', "null", "[1]", "{}"])
def test_a_record_whose_time_is_no_number_is_left_out_by_all_who_read_it(tmp_path, bad):
    run = FakeRun(tmp_path / "run").begin().train(0, 120)
    before, told = read_run(run.path), explained(read_run(run.path)).lines()
    for file in (run.folder.events, run.folder.metrics):
        *_, last = file.read_text().splitlines()
        with file.open("a") as lines:
            lines.write(re.sub(r'"time": ?[\d.e+]+', f'"time": {bad}', last) + "\n")
        assert file.read_text().count(f'"time": {bad}') == 1
        assert all(isinstance(line["time"], float) for line in Tail(file).poll())
    found = read_run(run.path)
    assert (found.events, found.steps) == (before.events, before.steps)
    assert explained(found).lines() == told
    assert math.isfinite(seen_failures(run.folder)[1])


def test_a_newer_record_is_refused(tmp_path):
    run = FakeRun(tmp_path).begin()
    run.folder.metrics.write_text('{"v": 2, "kind": "step", "time": 0}\n')
    with pytest.raises(UserError, match="newer manyhands"):
        read_run(tmp_path)


def test_a_folder_that_is_no_run_names_the_runs_nearby(tmp_path):
    FakeRun(tmp_path / "runs" / "mine").begin()
    with pytest.raises(UserError) as error:
        read_run(tmp_path / "runs")
    assert "mine" in str(error.value)
    with pytest.raises(UserError, match="there is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_resumed_run_is_whole(tmp_path):
    complete(tmp_path, epochs=10)
    run = read_run(tmp_path)
    assert [record.step for record in run.steps] == list(range(10, 1001, 10))
    assert [record.epoch for record in run.evaluations] == list(range(1, 11))
    assert len(run.sessions) == 2
    assert run.best is not None
    assert run.last is not None


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


def test_exceptions_are_read_from_a_plan_that_is_damaged_elsewhere(tmp_path):
    run = FakeRun(tmp_path).begin()
    content = json.loads(run.folder.plan.read_text())
    run.folder.plan.write_text(json.dumps({**content, "norm_group": None, "layout": {}}))
    assert read_run(tmp_path).plan.exceptions == content["exceptions"]


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
    for told in (
        lambda record: record.samples,
        lambda record: record.samples * record.loss,
        lambda record: record.samples / record.images_per_s,
    ):
        assert math.fsum(map(told, thinned)) == pytest.approx(math.fsum(map(told, records)))
    if len(records) < most:
        assert thinned == records


@given(PLANS)
def test_resumed_run_is_thinned_to_its_latest_records(plan):
    """Nothing that was forgotten is left: all samples are of steps up to the last, at most once."""
    records = [step_record(begin + number, 0.0) for begin, count in plan for number in range(count)]
    thinned = without_repeats(records, [], 4)
    whole = without_repeats(records, [])
    assert [record.step for record in thinned[-1:]] == [record.step for record in whole[-1:]]
    assert sum(record.samples for record in thinned) <= sum(record.samples for record in whole)


@pytest.mark.slow
def test_a_long_run_is_read_in_memory_of_a_known_size(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.report.read.MOST_RECORDS", 256)
    peaks = {}
    for epochs in (10, 100):
        FakeRun(tmp_path / str(epochs), epochs=epochs, steps_per_epoch=100, record_every=1).begin().train()
        read_run(tmp_path / "10")
        tracemalloc.start()
        run = read_run(tmp_path / str(epochs))
        peaks[epochs] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 128 <= len(run.steps) <= 256
        assert sum(record.samples for record in run.steps) == epochs * 100 * 128
        assert run.steps[-1].step == epochs * 100
    assert peaks[100] < 2 * peaks[10]
