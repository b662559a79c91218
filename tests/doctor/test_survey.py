"""A survey of real agents on this machine, and its probes over real sockets: who is reached, and nothing stays open."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.machines import Machines, MachineState, RunMachine, open_local_agent
from manyhands.cluster.doctor.findings import FactsWanted, Survey, examine
from manyhands.cluster.doctor.probe import Listener, Probe
from manyhands.cluster.doctor.survey import local_candidates, take_survey
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import CallResult, call, decode, encode, perform
from manyhands.config.load import load_job
from manyhands.core.errors import RunError
from manyhands.run.doctor import diagnose, survey_agents
from tests.e2e.command import inside, run, wait_until


@pytest.fixture
def agents(tmp_path):
    """Three agents that all are on this machine, under names of their own."""
    links = [open_local_agent(tmp_path / f"{name}.log", Machine(name)) for name in ("a", "b", "c")]
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


def test_this_machine_alone_opens_loopback_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = json.loads(inside("doctor", "digits", "mlp", "--json").out)
    assert told["hosts"] == list(told["facts"])
    assert not told["fails"]
    exposed = json.loads(inside("doctor", "--exposure", "--json").out)
    assert exposed["then"] == ["train, fit and session open ports on loopback only, for users of this machine"]
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


@pytest.fixture
def probe():
    made = Probe()
    yield made
    made.unlisten()


def ask(probe, request):
    """As over a wire."""

    def sent(message):
        return decode(encode(message))[1]

    return request.result(sent(CallResult(perform(probe, sent(request.call)))))


def listen(probe, address="127.0.0.1", **more):
    (listener,) = ask(probe, call(Probe.listen, (address,), **more))
    return listener


def attempts(probe, *targets):
    return ask(probe, call(Probe.connect, {"n2": targets}, timeout_s=2))["n2"]


def test_a_listener_is_reached_and_what_is_measured_went_through(probe):
    (attempt,) = attempts(probe, listen(probe))
    assert (attempt.result, attempt.local) == ("ok", "127.0.0.1")
    assert attempt.latency_ms > 0
    assert ask(probe, call(Probe.measure, listen(probe), 0.2)) > 1


def test_another_token_is_another_machine(probe):
    one, two = listen(probe), listen(probe)
    assert [a.result for a in attempts(probe, replace(one, token=two.token), two)] == ["other", "ok"]
    assert ask(probe, call(Probe.measure, replace(one, token="00" * 16), 0.2)) is None


def test_a_program_that_speaks_first_is_another(probe):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(99)

        thread = threading.Thread(target=greet)
        thread.start()
        target = Listener("127.0.0.1", server.getsockname()[1], "00" * 16)
        assert attempts(probe, target)[0].result == "other"
        thread.join()


def test_only_the_addresses_asked_for_are_listened_on(probe):
    target = listen(probe, "127.0.0.2")
    assert [a.result for a in attempts(probe, target, replace(target, address="127.0.0.3"))] == ["ok", "refused"]


@pytest.mark.slow
def test_nothing_stays_open(probe):
    before = threading.active_count()
    target = listen(probe)
    assert attempts(probe, target)[0].result == "ok"
    ask(probe, call(Probe.unlisten))
    assert attempts(probe, target)[0].result == "refused"
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(10)
    assert threading.active_count() <= before


def test_a_listener_that_nobody_closes_closes_itself(probe):
    target = listen(probe, seconds=0.5)
    assert attempts(probe, target)[0].result == "ok"
    wait_until(lambda: attempts(probe, target)[0].result == "refused")


def test_an_address_that_is_not_ours_and_a_port_that_is_taken_are_said(probe):
    assert listen(probe, "192.0.2.1").error
    told = listen(probe, port=listen(probe).port)
    assert re.search("in use, by .*(python|pytest)", told.error)


LISTENS = """
import socket
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
input()
"""


def listening(*words):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", LISTENS, *words], **pipes)


def test_only_what_processes_of_manyhands_listen_on_is_named():
    with listening("manyhands.worker.entry") as ours, listening("another") as theirs, socket.create_server(("", 0)):
        port, other = int(ours.stdout.readline()), int(theirs.stdout.readline())
        found = {each.port: each for each in Probe().open_ports()}
        assert (found[port].address, found[port].lets_in, found[port].pid) == ("127.0.0.1", True, ours.pid)
        assert other not in found
        ours.communicate("")
        theirs.communicate("")
