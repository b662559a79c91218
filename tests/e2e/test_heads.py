"""The process that a user starts never loads torch; those that train are others."""

import json

import pytest

from manyhands.core.errors import EXIT_SAVED
from tests.e2e.command import QUICK, end, finish, run, start, wait_until

# Leaves with the command's own code, or in a traceback where the head has loaded torch.
HEAD = """
import sys
from manyhands.cli.main import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""
JOB = ("digits", "mlp", *QUICK, "--device", "cpu")
SHORT = (*JOB, "--epochs", "1", "--set", "train.max_steps=3", "--out", "runs/one")


def head(*arguments):
    ended = run(*arguments, program=("-c", HEAD))
    assert ended.code == 0, (arguments, ended)
    return ended.out


@pytest.mark.slow
def test_of_a_run_on_machines():
    head("launch", "--hosts", "127.0.0.1:1", *SHORT)


@pytest.mark.slow
def test_of_a_run_and_of_what_reads_it(here):
    head("train", "-n", "1", *SHORT)
    (here / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    head("explain", "--cluster", "hosts", "--write", "again")
    head("report", "runs/one")
    head("logs", "runs/one")
    head("explain", "runs/one/job.toml")
    whole = json.loads(head("checkpoint", "info", "runs/one", "--json"))
    assert whole["format"] == "whole"
    assert {entry["dtype"] for entry in whole["model"].values()} == {"float32"}
    [weights] = here.glob("runs/one/checkpoints/*/model.safetensors")
    alone = json.loads(head("checkpoint", "info", weights, "--json"))
    assert alone["model"] == whole["model"]


@pytest.mark.slow
def test_of_a_run_that_goes_on_and_of_what_stops_it(here):
    process = start("train", *JOB, "--epochs", "1000000", "--out", "runs/long", program=("-c", HEAD))
    try:
        wait_until(lambda: "step" in head("ps"), process)
        head("logs", "runs/long")
        head("stop", "runs/long")
        assert finish(process).code == EXIT_SAVED
    finally:
        end(process)
