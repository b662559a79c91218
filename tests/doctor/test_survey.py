"""A survey of real agents on this machine, over their own pipes."""

import json
import os
import socket

import pytest

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.machines import Machines, MachineState, RunMachine, open_here
from manyhands.cluster.doctor.findings import FactsWanted, Survey, examine
from manyhands.cluster.doctor.survey import local_candidates, take_survey
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import call
from manyhands.config.load import load_job
from manyhands.core.errors import RunError
from manyhands.run.doctor import diagnose, survey_agents
from tests.e2e.command import run


@pytest.fixture
def agents(tmp_path):
    """Three agents that all are on this machine, under names of their own."""
    links = [open_here(tmp_path / f"{name}.log", Machine(name)) for name in ("a", "b", "c")]
    yield links
    for link in links:
        link.close()


def machines_of(links):
    return Machines([RunMachine(link.machine, MachineState.RUNNING, link=link) for link in links])


def facts_of(links):
    facts = {link.machine.name: link.ask(call(Agent.hello, FactsWanted()), 30) for link in links}
    for fact in facts.values():  # bridges of labs (tests/network/lab.py) come and go meanwhile
        fact["interfaces"] = [one for one in fact["interfaces"] if not one["name"].startswith("mh")]
    if not local_candidates(facts["a"]):
        pytest.skip("this machine has no network beside loopback to try ways over")
    return facts


def failing(survey):
    """The hosts of what would fail, but for what is true of these agents: they are one machine under several names."""
    return [found.hosts for found in examine(survey) if found.severity == "fail" and found.check != "twice"]


def test_every_way_is_tried_and_measured_and_a_machine_that_goes_meanwhile_is_the_one_finding(agents):
    survey = Survey(("a", "b", "c"), facts_of(agents))
    take_survey(machines_of(agents).ask_named, survey)
    pairs = {(one, two) for one in "abc" for two in "abc" if one != two}
    assert set(survey.reach) == set(survey.mbps) == set(survey.latency_ms) == pairs
    assert set(survey.chosen) == set("abc")
    assert all(abs(offset) <= uncertain + 0.01 for offset, uncertain in survey.clock_s.values())
    assert failing(survey) == []
    agents[1].process.kill()
    survey = Survey(("a", "b", "c"), survey.facts)
    take_survey(machines_of(agents).ask_named, survey)
    assert set(survey.errors) == {"b"}
    assert set(survey.mbps) == {("a", "c"), ("c", "a")}
    assert failing(survey) == [("b",)]


def test_a_machine_that_does_not_take_part_is_no_finding(agents):
    """Such as one that doesn't answer when a run is resumed without it."""
    facts = facts_of(agents)
    machines = machines_of(agents)
    for machine in machines.all:
        machine.facts = facts[machine.name]
    machines.all.append(RunMachine(Machine("d"), MachineState.LOST, problem=RunError("d does not answer")))
    job, named = load_job({}, environment={}).job, [machine.spec for machine in machines.running]
    assert not survey_agents(job, machines, named, measure=False).errors
    assert set(survey_agents(job, machines, [*named, Machine("d")], measure=False).errors) == {"d"}


def test_this_machine_alone(tmp_path):
    told = json.loads(run("doctor", "digits", "mlp", "--json", cwd=tmp_path).out)
    assert told["hosts"] == list(told["facts"])
    assert not told["fails"]
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_the_users_own_that_a_job_names_are_looked_for():
    own = {"train.loss": "own.py:loss", "train.schedule": "rates.py:slow", "train.metrics": ["figures.py:top3"]}
    job = load_job({"data.name": "digits", "model.name": "mlp", **own}, environment={}).job
    needs = diagnose(job, print).survey.needs
    assert set(needs.files) == {"own.py", "rates.py", "figures.py"}


def test_missing_data_and_a_port_in_use_fail_and_are_shown_on_the_screen(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = run("doctor", "./pets", "mlp", "--set", f"cluster.init=tcp://127.0.0.1:{port}", cwd=tmp_path)
    assert done.code == 3
    said = (f"the data {tmp_path / 'pets'} is missing", f"port {port}", str(os.getpid()), "already in use")
    assert all(words in done.out for words in said), done.out
    assert "would fail" in done.out.splitlines()[-1]
