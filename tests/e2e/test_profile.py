"""`manyhands profile`: what a run's time went to."""

import json
import re

import pytest

from manyhands.core.phases import PHASES
from manyhands.report.read import read_run
from manyhands.report.time_shares import seconds_by_rank
from tests.e2e.command import NETS, QUICK, finish, forked, start

JOB = ("--epochs", "1", "--set", "data.train_samples=640", "--set", "train.max_steps=10", "--device", "cpu", *QUICK)
SLEPT_S = 10 * 0.1


def did(*arguments, by=forked, **others):
    ended = finish(by(*arguments, **others))
    assert not ended.code, ended.err
    return ended.out


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_who_waits_and_who_is_waited_for(tmp_path, shared):
    """Rank 1 sleeps in every forward pass: under shared memory and under DDP rank 0 waits for it, and it is named."""
    net = f"{NETS}:SleepsOnRank1"
    did("train", "digits", net, "-n", 2, "--out", "run", "--set", f"parallel.shared_memory={shared}", *JOB,
        cwd=tmp_path, by=start)  # fmt: skip
    first, second = seconds_by_rank(read_run(tmp_path / "run"))
    assert second["compute"] >= SLEPT_S
    assert first["communication"] >= 0.5 * SLEPT_S
    # Both trained side by side.
    assert sum(first.values()) == pytest.approx(sum(second.values()), rel=0.2)
    text = did("profile", "run", cwd=tmp_path)
    assert all(phase in text for phase in PHASES)
    assert re.search(r"would help most: rank 1 takes [0-9.]+ times as long as the other ranks", text)
    told = json.loads(did("profile", "run", "--json", cwd=tmp_path))
    assert told["ranks"][1]["compute"] >= SLEPT_S
    assert 0 < told["change"]["gain"] <= 1


def test_a_run_of_nothing_says_so(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "job.toml").write_text("")
    assert "has no time records yet" in did("profile", ".", cwd=tmp_path)


@pytest.mark.slow
def test_a_trace_has_all_processes_phases_and_operations(tmp_path):
    did("profile", "digits", "mlp", "-n", 2, "--steps", 3, "--out", "traced", "--device", "cpu", cwd=tmp_path, by=start)
    content = json.loads((tmp_path / "traced" / "trace.json").read_text())
    events = content["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(" on ")[0] for _, name in sorted(names.items())] == ["rank 0", "rank 1"]
    assert {event["pid"] for event in spans} == set(names)
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)
    for pid in names:
        mine = [event for event in spans if event["pid"] == pid]
        computing = [event for event in mine if (event["tid"], event["name"]) == (0, "compute")]
        forward = [event for event in mine if event["name"] == "aten::addmm"]
        assert {"data", "compute", "communication", "update"} <= {event["name"] for event in mine if event["tid"] == 0}
        # Three updates, of two layers at least; on one clock: what computes lies where its process computed.
        assert len(forward) >= 6
        among = [one for one in forward if any(_lies_in(one, span) for span in computing)]
        assert len(among) >= 0.9 * len(forward)
    # It is a run like any other, which neither saved nor evaluated.
    assert not list((tmp_path / "traced" / "checkpoints").glob("step-*"))
    assert "would help most" in did("profile", "traced", cwd=tmp_path)


def _lies_in(one, span, slack_us=1000):
    middle = one["ts"] + one["dur"] / 2
    return span["ts"] - slack_us <= middle <= span["ts"] + span["dur"] + slack_us


def test_no_updates_can_t_be_traced(tmp_path):
    ended = finish(forked("profile", "digits", "mlp", "--steps", 0, cwd=tmp_path))
    assert ended.code == 2
    assert "--steps must be 1 or more, found 0" in ended.err
