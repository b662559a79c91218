"""A drill says of each fault whether the run came through, and finds a run that doesn't."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.run.drill import FAULTS, chosen_faults
from manyhands.run.drill_attempt import to_words, without_processes
from manyhands.run.drill_hosts import no_hosts
from tests.docs.pages import ROOT
from tests.e2e.command import marked, run

pytestmark = pytest.mark.timeout(580)


def test_faults_are_chosen_by_name_in_the_order_of_the_table():
    assert [one.name for one in chosen_faults("nan, kill-rank")] == ["kill-rank", "nan"]
    assert chosen_faults("") == list(FAULTS)
    with pytest.raises(UserError, match='no fault "kil-rank"'):
        chosen_faults("kil-rank")


@pytest.mark.parametrize("word", ["--out", "--resume=x", "--init"])
def test_a_drill_leaves_runs_of_the_users_alone(word):
    with pytest.raises(UserError, match="makes its own runs"):
        to_words(["digits", word])


def test_every_row_of_the_list_of_faults_is_tried_and_every_fault_is_in_its_row():
    listed = (ROOT / "docs/experiments/faults.md").read_text()
    rows = {int(number): line for number, line in re.findall(r"^\| (\d+) (\|.*)$", listed, re.MULTILINE)}
    assert {fault.row for fault in FAULTS} == rows.keys() == set(range(1, 31))
    assert not [fault.name for fault in FAULTS if f"`{fault.name}`" not in rows[fault.row]]


def test_where_root_is_needed_it_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    lacking = {fault.row for fault in FAULTS if "root" in fault.lacks()}
    assert {3, 4, 5, 8, 9, 10} <= lacking


def test_tools_are_found_where_a_user_that_has_become_root_lacks_them_in_the_path(monkeypatch):
    found = no_hosts()
    monkeypatch.setenv("PATH", "")
    assert no_hosts() == found


def test_words_for_machines_say_no_number_of_processes():
    assert without_processes(["digits", "-n", "2", "mlp", "--processes=3", "--lr", "2"]) == [
        "digits",
        "mlp",
        "--lr",
        "2",
    ]


@pytest.mark.slow
def test_a_run_that_fails_by_itself_is_no_drill(here):
    ended = run("drill", "digits", "no-such-network")
    assert ended.code == 2
    assert "the run fails without any fault too" in ended.err
    assert "no-such-network" in ended.err


@pytest.mark.slow
def test_a_run_comes_through_and_nothing_is_left(here):
    faults = "kill-rank,kill-agent,kill-head,raise-always,nan,sigterm,kill-saving,disk-full,altered-checkpoint"
    faults += ",pickle-checkpoint,corrupt-picture,other-classes,rank-twice,no-host,clock,shell-in-names"
    ended = run("drill", "--faults", faults, "--json")
    assert ended.code == 0, ended.err
    told = {one["name"]: one for one in json.loads(ended.out)["faults"]}
    assert {one["verdict"] for one in told.values()} == {"holds"}
    assert len(told) == 16
    assert told["kill-rank"]["updates_lost"] <= 1
    assert told["kill-rank"]["back_s"] > 0
    assert not marked("DRILL_FOLDER")
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_process_that_the_system_kills_for_its_memory_is_named_and_replaced(here):
    (fault,) = chosen_faults("memory")
    if lacking := fault.lacks():
        pytest.skip(lacking)
    ended = run("drill", "--faults", "memory", "--json")
    assert ended.code == 0, ended.err + ended.out
    (told,) = json.loads(ended.out)["faults"]
    assert (told["row"], told["verdict"]) == (14, "holds")


@pytest.mark.slow
def test_a_run_that_a_fault_ends_is_found(here):
    ended = run(
        "drill", "digits", "mlp", "--epochs", "12", "--elastic", "off", "--faults", "kill-rank", "--keep", "kept"
    )
    assert ended.code == 1, ended.err
    assert "kill-rank  fails" in ended.out
    assert "it ended with 1, not 0" in ended.out
    assert Path("kept/kill-rank/run/events.jsonl").is_file()


@pytest.mark.slow
def test_the_faulty_network_is_the_network_itself(here):
    """Weights, names and initial values are those of the network alone."""
    program = """
import torch
from manyhands.core.planted import PlantedFault
from manyhands.models.build import build_model
from manyhands.models.options import ModelOptions
import os
os.environ.update(PlantedFault(folder=".", group="", model={"name": "mlp"}, channels=1, size=8).as_variable())
from manyhands.worker.faulty_network import network
torch.manual_seed(1)
mine = network(10).state_dict()
torch.manual_seed(1)
plain = build_model(ModelOptions(name="mlp"), channels=1, size=8, num_classes=10).state_dict()
assert mine.keys() == plain.keys()
assert all(torch.equal(mine[name], plain[name]) for name in plain)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
