"""Processes take unequal shares of each update: what is recorded, what is refused, and going on elsewhere."""

import json

import pytest

from manyhands.run.python import Run
from tests.e2e.command import QUICK, assert_one_screen, events, final_weights, run

COMMON = ["train", "digits", "mlp", "--batch", "32", "--epochs", "1", *QUICK[:-1], "train.precision=fp64"]


def train(out, *arguments):
    return run(*COMMON, "--out", out, *arguments)


def shared(folder):
    return json.loads((folder / "plan.json").read_text())["shares"]


@pytest.mark.slow
def test_a_run_with_unequal_shares_is_the_undisturbed_run(tmp_path):
    uneven, alone = tmp_path / "uneven", tmp_path / "alone"
    ended = train(uneven, "-n", "2", "--set", "cluster.shares=[24,8]")
    assert ended.code == 0, ended.err
    assert train(alone).code == 0
    assert shared(uneven) == [[24, 8]]
    (told,) = (event for event in events(uneven) if event["kind"] == "shares")
    assert told["data"]["shares"] == [24, 8]
    assert told["message"] == "shares of the batch of 32 samples, by process: 24, 8"
    assert "shares of the batch of 32 samples, by process: 24, 8" in run("profile", uneven).out
    assert json.loads(run("profile", uneven, "--json").out)["shares"] == Run(uneven, "finished").shares == [24, 8]
    wanted, got = final_weights(alone), final_weights(uneven)
    assert all((got[name] - wanted[name]).abs().max() <= 1e-9 for name in wanted)

    ended = run("resume", uneven, "-n", "3", "--epochs", "2", *QUICK)
    assert ended.code == 0, ended.err
    assert "cluster.shares has 2 number(s) for 3 processes; using equal shares" in ended.err
    assert shared(uneven) == [[10, 11, 11]]


@pytest.mark.parametrize(
    ("shares", "more", "what"),
    [
        ("[24,9]", (), "the sum of cluster.shares [24, 9] is 33, but train.batch is 32"),
        ("[32]", (), "cluster.shares has 1 number(s) for 2 processes"),
        ("[32,0]", (), "cluster.shares: should be machines, equal, auto, or a list of one whole number"),
        ("fast", (), 'found "fast"'),
        pytest.param("[24,8]", ("--sync", "local"), "normalises each process's own", marks=pytest.mark.slow),
        pytest.param("[24,8]", ("--parallel", "semi"), "--parallel semi splits each batch", marks=pytest.mark.slow),
        pytest.param("auto", ("--parallel", "fsdp"), "their speed can't be measured", marks=pytest.mark.slow),
        pytest.param("auto", ("--parallel", "semi"), "--parallel semi splits each batch", marks=pytest.mark.slow),
    ],
)
def test_what_can_not_be_is_refused_in_one_screen(shares, more, what, tmp_path):
    ended = train(tmp_path / "run", "-n", "2", "--set", f"cluster.shares={shares}", *more)
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert what in ended.err
