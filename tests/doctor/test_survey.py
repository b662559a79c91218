"""Facts are true of this machine; a survey says who is reached at which address, and nothing stays open."""

import contextlib
import importlib.metadata
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.machines import Machines, MachineState, RunMachine, open_local_agent
from manyhands.cluster.doctor import facts as fact_module
from manyhands.cluster.doctor import survey as surveys
from manyhands.cluster.doctor.accelerators import cards
from manyhands.cluster.doctor.facts import find_data_files, gather_facts, hash_code_files, other_jobs
from manyhands.cluster.doctor.findings import Attempt, FactsWanted, Survey, examine
from manyhands.cluster.doctor.probe import Listener, Probe
from manyhands.cluster.doctor.survey import local_candidates, take_survey
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import CallResult, call, decode, encode, perform
from manyhands.config.load import load_job
from manyhands.core.errors import RunError
from manyhands.run.doctor import diagnose, survey_agents
from tests.e2e.command import QUICKLY, done, inside, refused, start, wait_until


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
    reported = json.loads(inside("doctor", "digits", "mlp", "--json").out)
    assert reported["hosts"] == list(reported["facts"])
    assert not reported["fails"]
    exposed = json.loads(inside("doctor", "--exposure", "--json").out)
    assert exposed["then"] == ["train, fit and session open ports on loopback only, for users of this machine"]
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_the_users_own_that_a_job_names_are_looked_for():
    own = {"train.loss": "own.py:loss", "train.schedule": "rates.py:slow", "train.metrics": ["figures.py:top3"]}
    job = load_job({"data.name": "digits", "model.name": "mlp", **own}, environment={}).job
    assert set(diagnose(job, print).survey.needs.files) == {"own.py", "rates.py", "figures.py"}


def test_missing_data_and_a_port_in_use_fail_and_are_shown_on_the_screen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        shown = done("doctor ./pets mlp --set", f"cluster.init=tcp://127.0.0.1:{port}", by=inside, code=3).out
    said = (f"the data {tmp_path / 'pets'} is missing", f"port {port}", str(os.getpid()), "already in use")
    assert all(words in shown for words in said), shown
    assert "would fail" in shown.splitlines()[-1]


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


def test_a_listener_is_reached_and_measured_by_its_address_and_token_alone(probe):
    one, two = listen(probe), listen(probe, "127.0.0.2")
    foreign, elsewhere = replace(one, token=two.token), replace(two, address="127.0.0.3")
    tried = attempts(probe, one, two, foreign, elsewhere)
    assert [attempt.result for attempt in tried] == ["ok", "ok", "other", "refused"]
    assert tried[0].local == "127.0.0.1"
    assert tried[0].latency_ms > 0
    assert ask(probe, call(Probe.measure, one, 0.2)) > 1
    assert ask(probe, call(Probe.measure, foreign, 0.2)) is None


def test_a_program_that_speaks_first_is_another(probe):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(99)

        thread = threading.Thread(target=greet)
        thread.start()
        assert attempts(probe, Listener("127.0.0.1", server.getsockname()[1], "00" * 16))[0].result == "other"
        thread.join()


def test_a_listener_closes_when_asked_or_by_itself_and_no_thread_stays(probe):
    before = threading.active_count()
    closed, left = listen(probe), listen(probe, seconds=0.5)
    assert [attempt.result for attempt in attempts(probe, closed, left)] == ["ok", "ok"]
    wait_until(lambda: attempts(probe, left)[0].result == "refused")
    assert attempts(probe, closed)[0].result == "ok"
    ask(probe, call(Probe.unlisten))
    assert attempts(probe, closed)[0].result == "refused"
    wait_until(lambda: threading.active_count() <= before)


def test_an_address_that_is_not_ours_and_a_port_that_is_taken_are_said(probe):
    assert listen(probe, "192.0.2.1").error
    assert re.search("in use, by .*(python|pytest)", listen(probe, port=listen(probe).port).error)


LISTENS = """
import socket
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
input()
"""


def test_only_what_processes_of_manyhands_listen_on_is_named():
    with contextlib.ExitStack() as stack, socket.create_server(("", 0)):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        lines = [[sys.executable, "-c", LISTENS, word] for word in ("manyhands.worker.entry", "another")]
        ours, theirs = (stack.enter_context(subprocess.Popen(line, **pipes)) for line in lines)
        port, other = int(ours.stdout.readline()), int(theirs.stdout.readline())
        found = {each.port: each for each in Probe().open_ports()}
        assert (found[port].address, found[port].lets_in, found[port].pid) == ("127.0.0.1", True, ours.pid)
        assert other not in found


CARDS = ("accelerators", "cards", "torch_devices")
WAITING = ["-c", "import time; print(flush=True); time.sleep(100)"]


def test_facts_are_json_and_true_of_this_machine(tmp_path):
    facts = json.loads(json.dumps(gather_facts(FactsWanted(workdir=str(tmp_path), data="digits"))))
    assert facts["errors"] == {}
    assert facts["name"]["host"] == socket.gethostname()
    addresses = {a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family == socket.AF_INET}
    assert addresses <= {entry["address"] for interface in facts["interfaces"] for entry in interface["addresses"]}
    assert facts["python"] == {"version": sys.version.split()[0], "path": sys.executable}
    assert facts["versions"]["torch"]
    assert 0 < facts["cores"] <= psutil.cpu_count()
    assert facts["data"] == {"kind": "none"}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """Puts a shell script in the place of NVIDIA's tool."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(script):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        return tool

    return put


def test_what_nvidias_tool_says_is_read_and_what_cannot_be_found_hides_no_other_fact(nvidia):
    """In the form that is asked of it: of two devices the first is in use, the second doesn't tell its load."""
    nvidia(
        "case $1 in\n--query-gpu=*) echo '0, GPU-a1, NVIDIA H200, 143771, 90001, 98'\n"
        "echo '1, GPU-b2, NVIDIA H200, 143771, 4, [N/A]';;\n*) echo 'GPU-a1, 4711, 90000, python, with a comma';;\nesac"
    )
    one, two = gather_facts(FactsWanted(only=("accelerators",)))["accelerators"]
    assert (one["name"], one["used_mib"], one["busy_percent"]) == ("NVIDIA H200", 90001, 98)
    assert one["processes"] == [{"pid": 4711, "used_mib": 90000, "name": "python, with a comma"}]
    assert (two["index"], two["busy_percent"], two["processes"]) == (1, 0, [])
    nvidia("echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18")
    facts = gather_facts(FactsWanted(only=("accelerators", "cores")))
    assert "version mismatch" in facts["errors"]["accelerators"]
    assert facts["cores"]


def test_cards_are_found_on_the_pci_bus_whether_or_not_a_driver_works(tmp_path):
    devices = {"0000:01:00.0": ("0x10de", "0x030200"), "0000:02:00.0": ("0x1002", "0x120000"),
               "0000:03:00.0": ("0x19e5", "0x120000"), "0000:00:02.0": ("0x8086", "0x030000"),
               "0000:01:00.1": ("0x10de", "0x040300"), "0000:04:00.0": ("0x1002", "0x030000")}  # fmt: skip
    for address, (vendor, kind) in devices.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(vendor + "\n")
        (tmp_path / address / "class").write_text(kind + "\n")
    (tmp_path / "0000:05:00.0").mkdir()
    assert cards(tmp_path) == [
        {"vendor": "NVIDIA", "address": "0000:01:00.0"},
        {"vendor": "AMD", "address": "0000:02:00.0"},
        {"vendor": "Huawei", "address": "0000:03:00.0"},
    ]
    assert cards(tmp_path / "none") == []


def test_torch_is_asked_only_where_there_is_a_card_and_somebody_wants_it(nvidia):
    tool = nvidia("case $1 in --query-gpu=*) echo '0, GPU-a1, NVIDIA A100, 81920, 4, 0';; esac")
    seen = gather_facts(FactsWanted(torch=True, only=CARDS))["torch_devices"]
    assert set(seen) == {"count", "built_for", "version", "said"}
    assert seen["version"] == importlib.metadata.version("torch") or "+" in seen["version"]
    assert gather_facts(FactsWanted(only=CARDS))["torch_devices"] is None
    tool.unlink()
    if not cards():
        assert gather_facts(FactsWanted(torch=True, only=CARDS))["torch_devices"] is None


names = st.text("abcdef", min_size=1, max_size=4)
trees = st.dictionaries(names.map("{}.py".format), st.binary(max_size=20), min_size=1, max_size=5)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@settings(max_examples=30)
@given(trees, trees)
def test_two_folders_have_one_fingerprint_exactly_if_their_code_or_the_names_and_sizes_of_their_data_are_equal(
    tmp_path_factory, one, two
):
    folders = [write(tmp_path_factory.mktemp("code"), files) for files in (one, two)]
    assert (hash_code_files(folders[0])["hash"] == hash_code_files(folders[1])["hash"]) == (one == two)
    shapes = [{name: len(content) for name, content in files.items()} for files in (one, two)]
    prints = [find_data_files(str(folder), "", folder) for folder in folders]
    assert (prints[0]["hash"] == prints[1]["hash"]) == (shapes[0] == shapes[1])
    assert prints[0]["files"] == len(one)


def test_named_data_is_looked_for_where_it_would_lie(tmp_path):
    absent = {"kind": "named", "path": str(tmp_path / "mnist"), "exists": False}
    assert find_data_files("mnist", str(tmp_path), tmp_path) == absent
    write(tmp_path, {"MNIST/raw/x.gz": b"12"})
    assert find_data_files("mnist", str(tmp_path), tmp_path)["files"] == 1
    assert find_data_files("./pets", "", tmp_path)["exists"] is False
    for name in ("digits", "synthetic:9x1x4x4x2", "fake-imagenet", "data.py:pets"):
        assert find_data_files(name, "", tmp_path) == {"kind": "none"}


def test_other_jobs_are_known_by_what_they_run():
    """A process's own words are its parent's to choose, so that sleep can stand for all."""
    jobs, others = (["torchrun"], ["python", "-m", "deepspeed"]), (["ssh", "n2", "torchrun"], ["vim", "on_torchrun.py"])
    with contextlib.ExitStack() as stack:
        started = []
        for first, *rest in (*jobs, *others):
            program = f"import os; os.execv({sys.executable!r}, {[first, *WAITING, *rest]!r})"
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
            assert process.stdout.readline() == b"\n"
        found = {job["pid"] for job in other_jobs()}
    assert [process.pid in found for process in started] == [True, True, False, False]


def test_a_torchvision_made_for_another_torch_is_found_and_is_one_screen(tmp_path, monkeypatch):
    """Tried by its import, and that alone where what it asks for isn't there; what can be imported is used."""
    package, reported = tmp_path / "torchvision", tmp_path / "torchvision-0.1.0.dist-info"
    package.mkdir()
    reported.mkdir()
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    (package / "__init__.py").write_text(broken)
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\nRequires-Dist: torch==2.1.0\n"
    (reported / "METADATA").write_text(metadata)
    said = ("torchvision 0.1.0 is for torch 2.1.0", "operator torchvision::nms does not exist")
    job = f"train digits mlp {QUICKLY} --set train.compile=true"
    refused(job, by=start, says=said, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = gather_facts(FactsWanted(only=("torchvision",)))["torchvision"]
    assert all(words in found for words in said), found
    (package / "__init__.py").write_text("")
    assert gather_facts(FactsWanted(only=("torchvision",)))["torchvision"] == ""
    # One of another build is tried too, although its version and the torch that it asks for are right; none is needed.
    (package / "__init__.py").write_text(broken)
    of = {"torch": "2.15.0+cpu", "torchvision": "0.30.0"}
    monkeypatch.setattr(fact_module, "_version", lambda name: of.get(name, ""))
    monkeypatch.setattr(fact_module.metadata, "requires", lambda _name: ["torch==2.15.0"])
    another = "torchvision 0.30.0 is a different build and can't be imported with torch 2.15.0+cpu"
    assert another in fact_module.torchvision_import_error()
    for change in ({"torch": "2.15.0"}, {"torch": "2.15.0+cpu", "torchvision": ""}):
        of |= change
        assert fact_module.torchvision_import_error() == ""


NAMES = ("eth0", "eno1", "enp3s0", "docker0", "br-1a2b", "wg0", "tailscale0", "virbr0", "ib0", "lo")
HOSTS = ("a", "b", "c", "d")


def interface(name, *addresses, up=True, speed=0):
    split = (each.split("/") for each in addresses)
    entries = [{"address": address, "prefix": int(prefix)} for address, prefix in split]
    return {"name": name, "up": up, "speed_mbps": speed, "addresses": entries}


addresses = st.one_of(
    st.builds("10.0.{}.{}/24".format, st.integers(0, 1), st.integers(1, 254)),
    st.builds("8.1.{}.{}/20".format, st.integers(0, 255), st.integers(1, 254)),
    st.builds("fd00:{:x}::{:x}/64".format, st.integers(0, 1), st.integers(1, 254)),
    st.sampled_from(["127.0.0.1/8", "::1/128", "fe80::1/64"]),
)
speeds = st.sampled_from([0, 1000, 10_000])
made = st.builds(interface, st.sampled_from(NAMES), addresses, addresses, up=st.booleans(), speed=speeds)
interfaces = st.lists(made, max_size=4, unique_by=lambda one: one["name"])


def reached(facts, result=lambda: "ok"):
    """For each ordered pair what became of the attempts at each address."""
    pairs = [(one, two) for one in facts for two in facts if one != two]
    return {pair: tuple(Attempt(address, result()) for address in local_candidates(facts[pair[1]])) for pair in pairs}


@st.composite
def clusters(draw):
    """Facts, and for each ordered pair what became of each attempt."""
    facts = {host: {"interfaces": draw(interfaces)} for host in HOSTS[: draw(st.integers(1, 4))]}
    results = st.sampled_from(["ok", "ok", "ok", "refused", "timeout", "other"])
    return facts, reached(facts, lambda: draw(results))


def reached_by_all(facts, reach, host):
    """A machine's addresses that every other one reached."""
    others = [reach[other, host] for other in facts if other != host]
    own = local_candidates(facts[host])
    return [a for a in own if all(any(t.address == a and t.result == "ok" for t in tries) for tries in others)]


def addresses_on(interface):
    return {str(ipaddress.ip_address(entry["address"])) for entry in interface["addresses"]}


ON_TWO = {"interfaces": [interface("docker0", "10.0.0.1/24"), interface("eth0", "10.0.0.1/24")]}


@given(clusters())
@example(({"a": ON_TWO}, {}))  # one address on two interfaces
def test_the_chosen_address_is_the_machines_own_reached_by_all_and_the_best_of_these(cluster):
    """IPv4 where all have it; bridges of containers only where nothing else works; whatever the machines' order is."""
    facts, reach = cluster
    chosen = surveys.choose_addresses(facts, reach)
    assert surveys.choose_addresses(dict(reversed(facts.items())), reach) == chosen
    usable = {host: found for host in facts if (found := reached_by_all(facts, reach, host))}
    assert set(chosen) == set(usable)
    fours = all(any("." in address for address in found) for found in usable.values())
    sixes = all(any(":" in address for address in found) for found in usable.values())
    for host, (name, address) in chosen.items():
        assert address in usable[host]
        assert not ipaddress.ip_address(address).is_loopback
        on = [one for one in facts[host]["interfaces"] if one["up"]]
        assert any(one["name"] == name and address in addresses_on(one) for one in on)
        assert ("." in address) == fours or (not fours and not sixes)
        alike = {a for a in usable[host] if (":" in a) == (":" in address)}
        assert surveys.link_penalty(name) == min(
            surveys.link_penalty(one["name"]) for one in on if alike & addresses_on(one)
        )


def test_the_subnet_that_all_share_wins_over_a_faster_interface_of_one_and_private_over_public():
    shared = {host: interface("eth0", f"10.0.0.{number}/24") for number, host in enumerate("abc", 1)}
    facts = {host: {"interfaces": [shared[host]]} for host in "abc"}
    facts["a"]["interfaces"].insert(0, interface("eth2", "8.8.8.1/24"))
    facts["b"]["interfaces"].insert(0, interface("eth1", "10.9.0.1/24", speed=100_000))
    facts["c"]["interfaces"].insert(0, interface("eth2", "8.8.8.3/24"))
    chosen = {"a": ("eth0", "10.0.0.1"), "b": ("eth0", "10.0.0.2"), "c": ("eth0", "10.0.0.3")}
    assert surveys.choose_addresses(facts, reached(facts)) == chosen
    del facts["b"]
    assert surveys.choose_addresses(facts, reached(facts)) == {host: chosen[host] for host in "ac"}


hosts = st.integers(0, 20).map(lambda count: [f"n{number}" for number in range(count)])


@given(hosts)
def test_each_ordered_pair_meets_once_nobody_is_in_two_pairs_of_a_round_and_rounds_are_few(names):
    played = [*surveys.pair_rounds(names)]
    met = [pair for pairs in played for pair in pairs]
    assert sorted(met) == sorted((one, two) for one in names for two in names if one != two)
    assert len(played) <= 2 * len(names)
    assert all(played)
    for pairs in played:
        seated = [name for pair in pairs for name in pair]
        assert len(seated) == len(set(seated))


@settings(max_examples=12)
@given(st.integers(1, 150))
@example(surveys.MOST_TRIED // 2)
@example(surveys.MOST_TRIED + 2)
def test_machines_try_all_others_or_of_many_some_and_the_first(count):
    """A thousand machines don't try a million ways; what is measured was tried; what holds all together is."""
    names = [f"n{number}" for number in range(count)]
    tried = surveys.connections_to_try(names)
    pairs = {(host, other) for host, others in tried.items() for other in others}
    assert list(tried) == names
    assert all(len(others) == len(set(others) - {host}) for host, others in tried.items())
    assert all(len(others) <= min(count - 1, surveys.MOST_TRIED) for others in tried.values())
    assert {(host, names[0]) for host in names[1:]} <= pairs
    assert {pair for pairs in islice(surveys.pair_rounds(names), surveys.MOST_ROUNDS) for pair in pairs} <= pairs
    reached = {name: sum(other == name for _, other in pairs) for name in names}
    assert all(times >= min(count - 1, surveys.MOST_TRIED // 2 - 1) for times in reached.values())
    if count <= surveys.MOST_TRIED // 2:
        assert len(pairs) == count * (count - 1)
