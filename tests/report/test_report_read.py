"""A run folder can be read in whatever state it is."""

import itertools
import json
import math
import re

import pytest
from fake_run import FakeRun, step_record
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.report.follow import Follower, Tail
from manyhands.report.read import read_run, sessions, without_repeats
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
@given(cut=st.integers(0, 4000), junk=st.binary(max_size=40))
def test_truncated_file_yields_its_complete_lines(tmp_path_factory, cut, junk):
    run = FakeRun(tmp_path_factory.mktemp("run")).begin().train(0, 120)
    text = run.folder.metrics.read_bytes()[:cut]
    run.folder.metrics.write_bytes(text + b"\n" + junk.replace(b"{", b"") + b'\n{"kind": "st')
    read = read_run(run.path)
    assert len(read.steps) + len(read.evaluations) == sum(line.endswith(b"}") for line in text.split(b"\n"))


@pytest.mark.parametrize("bad", ['"soon"', '"nan"', '"inf"', "null", "[1]", "{}"])
def test_a_record_whose_time_is_no_number_is_left_out_by_all_who_read_it(tmp_path, bad):
    run = FakeRun(tmp_path / "run").begin().train(0, 120)
    before, told = read_run(run.path), explain_run(read_run(run.path)).lines()
    for file in (run.folder.events, run.folder.metrics):
        *_, last = file.read_text().splitlines()
        with file.open("a") as lines:
            lines.write(re.sub(r'"time": ?[\d.e+]+', f'"time": {bad}', last) + "\n")
        assert file.read_text().count(f'"time": {bad}') == 1
        assert all(isinstance(line["time"], float) for line in Tail(file).poll())
    found = read_run(run.path)
    assert (found.events, found.steps) == (before.events, before.steps)
    assert explain_run(found).lines() == told
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
    for told in (
        lambda record: record.samples,
        lambda record: record.samples * record.loss,
        lambda record: record.samples / record.images_per_s,
    ):
        assert math.fsum(map(told, thinned)) == pytest.approx(math.fsum(map(told, records)))
    if len(records) < most:
        assert thinned == records
