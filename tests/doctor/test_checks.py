"""Every planted fault is found, named, and is the only one; a healthy cluster has none."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.doctor import findings
from manyhands.cluster.doctor.findings import Attempt, DoctorFinding, Needs, examine, merge_findings
from manyhands.cluster.doctor.survey import choose_addresses, connections_to_try
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import RunError
from manyhands.run.doctor import all_reduce_finding
from tests.doctor.planted import GIB, change, gpu, healthy

MIB = 1 << 20
TIMED_OUT = (Attempt("10.0.0.1", "timeout", port=4711),)


def wrong(survey):
    return [finding for finding in examine(survey) if finding.severity != "ok"]


def only(survey):
    """The one finding that there must be."""
    found = wrong(survey)
    assert len(found) == 1, [finding.what for finding in found]
    (finding,) = found
    assert finding.hints or finding.check in {"facts", "accelerators"}
    json.dumps(asdict(finding))
    return finding


@given(st.integers(1, 6), st.sampled_from(["auto", "cpu"]), st.booleans())
def test_a_healthy_cluster_has_nothing_wrong(count, device, code):
    assert wrong(healthy(count, Needs(device=device, files=("net.py",) if code else (), processes={"n1": 4}))) == []


FACTS = [
    # what is planted on n2, its value, check and severity, words of the finding
    ("name/addresses", ["127.0.1.1"], "names warn", ["127.0.1.1", "n2"]),
    ("name/addresses", ["::1"], "names warn", ["::1"]),
    ("name/addresses", ["10.0.0.77"], "names warn", ["10.0.0.77", "not an address of"]),
    ("default_interface", "docker0", "interface warn", ["docker0", "eth0", "n2"]),
    ("environment/GLOO_SOCKET_IFNAME", "docker0", "interface warn", ["GLOO_SOCKET_IFNAME=docker0", "eth0"]),
    ("versions/torch", "2.14.0", "versions fail", ["n2 has torch 2.14.0", "but n1 and n3 have 2.15.0"]),
    ("versions/torchvision", "0.28.0", "versions warn", ["torchvision 0.28.0"]),
    ("versions/manyhands", "0.0.9", "versions fail", ["manyhands 0.0.9"]),
    ("versions/nccl", "2.29.1", "versions fail", ["nccl 2.29.1"]),
    ("package", "bbbb", "versions fail", ["the source files of manyhands", "n2"]),
    ("python/version", "3.12.1", "versions warn", ["3.12.1", "3.11.7"]),
    ("compiler", False, "versions warn", ["C++ compiler", "missing on n2"]),
    ("data/exists", False, "data fail", ["the data /data is missing on n2"]),
    ("data/hash", "0000", "data fail", ["n2 has 10 files", "n1 has 10 files", "names or sizes"]),
    ("memory/free", 100 * MIB, "memory warn", ["100 MiB on n2"]),
    ("places/run folder/free", 5 * MIB, "disk fail", ["n2 5 MiB"]),
    ("places/run folder/free", GIB, "disk warn", ["n2 1024 MiB"]),
    ("places/run folder/writable", False, "disk fail", ["ada has no write permission for /job on n2"]),
    ("load", 7.5, "cpu warn", ["cores are busy", "7.5 on the 8 cores of n2"]),
    ("environment/OMP_NUM_THREADS", "64", "cpu warn", ["1 × 64 on the 8 cores of n2"]),
    ("errors/firewall", "TimeoutExpired: nft", "facts warn", ["firewall", "TimeoutExpired"]),
    ("errors/accelerators", "nvidia-smi says: mismatch", "accelerators fail", ["n2", "mismatch"]),
    ("jobs", [{"pid": 7, "user": "bob", "command": "torchrun x.py", "parent": 1}], "jobs warn", ["bob", "torchrun"]),
    ("places/shm/free", 64 * MIB, "memory warn", ["shm-size"]),
    ("places/shm/free", MIB, "memory fail", ["shm-size"]),
    ("versions", {"manyhands": "0.1.0", "torch": "2.14.0", "torchvision": "0.28.0", "nccl": "2.29.1", "numpy": "2.4.6"},
     "versions fail", ["ssh n2 /usr/bin/python3 -m pip install torch==2.15.0"]),
]  # fmt: skip
CODE = [("n3", "code/hash", "other"), ("n3", "code/files", {"net.py": "zz", "job.toml": "bb", "more.py": "cc"})]
NO_CODE = [("n3", "code", {"exists": False, "path": "/job"})]
NO_DATA = [("n2", "data", {"kind": "named", "path": "/data/mnist", "exists": False})]
GPUS = [(host, "accelerators", [gpu(0), gpu(1)]) for host in ("n1", "n2", "n3")]
IN_USE = gpu(0, used_mib=90000, processes=[{"pid": 12, "used_mib": 90000, "name": "python"}])
SEEN = {"count": 0, "built_for": "CUDA 13.2", "version": "2.15.0", "said": ""}
UNUSED = [("n1", "accelerators", [gpu(0)]), ("n1", "torch_devices", SEEN)]
NO_DRIVER = [("n1", "cards", [{"vendor": "NVIDIA", "address": "0000:01:00.0"}]), ("n1", "torch_devices", SEEN)]
CUDA, CPU, FILES = Needs(device="cuda"), Needs(device="cpu"), Needs(files=("net.py",))


def slow(pairs, mbps=9.5):
    """Links that are slow, of those from the first to the second machines; None: of all."""
    return lambda one: one.mbps.update((pair, mbps) for pair in one.mbps if pairs is None or pair in pairs)


PLANTED = [
    # machines, needs, what is planted, check, severity and machines ("": nothing is wrong), words of finding and hints
    *((3, Needs(), [("n2", path, value)], f"{check} n2", words) for path, value, check, words in FACTS),
    (3, Needs(), [("n2", "machine", "n1 0123")], "twice fail n1 n2",
     ["n1 and n2 are the same machine", 'list the machine once, with 2 processes: "n1 slots=2"']),
    # What to type on another machine has the user's ssh, its port and user.
    (3, Needs(reach={"n2": "ssh -F mine -p 31234 root@n2"}), [lambda one: one.clock_s.update(n2=(100.0, 0.01))],
     "clock warn n2", ["synchronize the clock: ssh -F mine -p 31234 root@n2 sudo timedatectl set-ntp true"]),
    (3, Needs(), [("n2", "torchvision", "torchvision 0.1.0 is for torch 2.1.0"),
                  lambda one: one.facts["n2"].pop("versions")],
     "versions fail n2", ["n2: torchvision 0.1.0 is for", "ssh n2 /usr/bin/python3 -m pip install torch torchvision"]),
    (3, Needs(), [("n1", "places/run folder/free", MIB), ("n2", "places/run folder/free", MIB)], "disk fail n1 n2",
     ["ssh n2 df -h /job", "ssh n1 df -h /job"]),
    (3, FILES, CODE, "code fail n3", ["more.py, net.py"]),
    (3, Needs(), CODE, "code warn n3", ["more.py, net.py"]),
    (3, Needs(), NO_CODE, "", []),
    (3, FILES, NO_CODE, "code fail n3", ["/job, is missing on n3"]),
    (3, Needs(download=True), NO_DATA, "data warn n2", []),
    (3, Needs(download=False), NO_DATA, "data fail n2", []),
    (3, Needs(device="cuda", processes={"n1": 2, "n2": 2, "n3": 2}), GPUS, "", []),
    (3, Needs(device="cuda", processes={"n1": 2, "n2": 2, "n3": 2}), [*GPUS, ("n2", "accelerators", [gpu(0)])],
     "accelerators fail n2", ["n2 has 1 for 2"]),
    (3, Needs(), [*GPUS, ("n2", "accelerators", [])], "accelerators fail n2", ["cpu on n2, cuda elsewhere"]),
    (3, Needs(), [*GPUS, ("n2", "accelerators", [IN_USE, gpu(1)])], "accelerators warn n2", ["process 12"]),
    (3, CPU, [*GPUS, ("n2", "accelerators", [IN_USE, gpu(1)])], "", []),
    (1, Needs(), [*UNUSED, ("n1", "torch_devices/said", "The NVIDIA driver on your system is too old")],
     "accelerators warn n1", ["torch can't use", "too old", "use the CPU", "13.2"]),
    (1, Needs(), [*UNUSED, ("n1", "torch_devices", {**SEEN, "built_for": "", "version": "2.15.0+cpu"})],
     "accelerators warn n1", ["is a CPU build"]),
    (1, Needs(), [*UNUSED, ("n1", "torch_devices/count", 1)], "", []),
    (1, Needs(), [("n1", "accelerators", [gpu(0, kind="npu", name="Ascend", memory_mib=0, used_mib=0)]),
                  ("n1", "torch_devices", {**SEEN, "built_for": "", "version": "2.15.0+cpu"})],
     "accelerators warn n1", ["(Ascend) that torch can't use", "pip install torch-npu"]),
    (1, Needs(), NO_DRIVER, "accelerators warn n1", ["0000:01:00.0", "without a working driver", "install the NVIDIA"]),
    (1, CPU, NO_DRIVER, "", []),
    (1, Needs(), [*NO_DRIVER, ("n1", "environment", {"CUDA_VISIBLE_DEVICES": ""})], "", []),
    (3, Needs(), [("n3", "firewall", ["tcp dport 1024-65535 drop"]),
                  lambda one: one.reach.update({(host, "n3"): TIMED_OUT for host in ("n1", "n2")})],
     "reach fail n3 n1 n2", ["tcp dport 1024-65535 drop"]),
    (3, Needs(port=29500), [lambda one: one.port_errors.update(n1="Address already in use, by python (process 7)")],
     "port fail n1", ["process 7"]),
    # Its receiving could not be measured.
    (4, Needs(), [slow({("n2", "n1"), ("n2", "n3"), ("n2", "n4")}), lambda one: [one.mbps.pop((host, "n2")) for host in
                                                                                ("n1", "n3", "n4")]],
     "links warn n2", ["the link of n2 is slow: sends 9.5 Mbit/s"]),
    (3, Needs(), [slow(None)], "links warn n1 n2 n3", ["the network is slow"]),
    (2, Needs(), [lambda one: one.latency_ms.update({("n1", "n2"): 80.0})], "links warn n1 n2", ["80 ms"]),
    (3, Needs(), [lambda one: one.chosen.pop("n2")], "reach fail n2", ["n2 has no address"]),
    (3, Needs(interface="ib0"), [], "interface fail n1 n2 n3", ["the interface ib0 is missing"]),
    (3, Needs(), [lambda one: setattr(one, "collective", all_reduce_finding(one, "no device"))],
     "collective fail n1 n2 n3", ["no device"]),
    (3, Needs(processes={"n1": 4}, threads=4), [], "cpu warn n1", ["4 × 4 on the 8 cores of n1"]),
]  # fmt: skip


@pytest.mark.parametrize(("count", "needs", "plants", "found", "words"), PLANTED)
def test_a_planted_fault_is_the_only_one_found_and_is_named(count, needs, plants, found, words):
    survey = healthy(count, needs)
    for plant in plants:
        plant(survey) if callable(plant) else change(survey, *plant)
    if not found:
        assert wrong(survey) == []
        return
    finding = only(survey)
    assert f"{finding.check} {finding.severity} {' '.join(finding.hosts)}" == found
    said = " ".join((finding.what, *finding.hints))
    assert all(word in said for word in words), said


def test_a_machine_that_cannot_be_asked_is_one_finding():
    survey = healthy(2)
    survey.hosts += ("n3",)
    survey.errors["n3"] = RunError("n3 can't be reached", "n3", ("is it switched on?",))
    survey.collective = all_reduce_finding(survey, "n3 did not come", ("n3",))
    finding = only(survey)
    assert (finding.check, finding.what, finding.hosts) == ("contact", "n3 can't be reached", ("n3",))


hosts = st.sampled_from(["n1", "n2", "n3", "n4"])


@given(hosts, st.sampled_from(["refused", "timeout", "unreachable", "other"]), st.sampled_from(["to", "from", "both"]))
def test_a_closed_machine_is_blamed_once(host, result, way):
    survey = healthy(4)
    for (one, two), (attempt,) in survey.reach.items():
        if (way in {"to", "both"} and two == host) or (way in {"from", "both"} and one == host):
            survey.reach[one, two] = (Attempt(attempt.address, result, port=4711),)
    survey.collective = all_reduce_finding(survey, "timeout")
    finding = only(survey)
    assert (finding.check, finding.severity, finding.hosts[0]) == ("reach", "fail", host)
    assert "4711" in finding.what
    assert ("refuse" in finding.what) == (result == "refused")


@given(st.sets(st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1]), min_size=1))
def test_every_pair_that_fails_is_in_a_finding(pairs):
    survey = healthy(4)
    for pair in pairs:
        survey.reach[pair] = TIMED_OUT
    found = wrong(survey)
    assert findings.any_failed(found)
    assert all(any(set(pair) <= set(finding.hosts) for finding in found) for pair in pairs)
    assert len(found) <= len(pairs)


@given(hosts, st.floats(0.5, 100))
def test_a_slow_machine_is_blamed_once_and_an_asymmetric_one_said_so(host, mbps):
    for ways in ((0,), (1,), (0, 1)):
        survey = healthy(4)
        survey.mbps = {pair: mbps if any(pair[way] == host for way in ways) else 941.0 for pair in survey.mbps}
        finding = only(survey)
        assert (finding.check, finding.severity, finding.hosts) == ("links", "warn", (host,))
        assert ("asymmetric" in finding.what) == (len(ways) == 1)


@given(hosts, hosts, st.booleans())
def test_a_slow_pair_is_named(one, two, both):
    if one == two:
        return
    survey = healthy(4)
    survey.mbps[one, two] = 9.6
    survey.mbps[two, one] = 9.6 if both else 941.0
    finding = only(survey)
    assert set(finding.hosts) == {one, two}
    assert "9.6 Mbit/s" in finding.what
    assert ("asymmetric" in finding.what) != both


@given(hosts, st.floats(2, 1e6), st.booleans())
def test_clocks_apart(host, by, ahead):
    survey = healthy(4)
    survey.clock_s[host] = (by if ahead else -by, 0.01)
    assert only(survey).hosts == (host,)
    survey.clock_s[host] = (survey.clock_s[host][0], by)
    assert wrong(survey) == []


@pytest.mark.parametrize("name", module_names(findings.CHECKS))
def test_a_file_of_checks_copes_with_missing_facts(name):
    survey = healthy()
    survey.facts = {host: {} for host in survey.hosts}
    survey.reach, survey.mbps, survey.chosen, survey.clock_s, survey.collective = {}, {}, {}, {}, None
    checks = load_choice(findings.CHECKS, name)
    assert list(checks.run(survey)) == []
    assert all(finding.severity == "ok" and finding.check in findings.ORDER for finding in checks.run(healthy()))


ANY = st.builds(
    DoctorFinding, st.sampled_from(["reach", "links", "cpu"]), st.sampled_from(findings.WORST_FIRST), st.just(("n1",)),
    st.text("ab", min_size=1, max_size=3), cause=st.sampled_from("pqrs"),
    explains=st.sampled_from([(), ("p",), ("q", "r")]),
)  # fmt: skip


@given(st.lists(ANY, max_size=8))
def test_one_finding_for_each_cause_and_the_worst_first(found):
    sorted_out = merge_findings(found)
    assert len({finding.cause for finding in sorted_out}) == len(sorted_out)
    severities = [findings.WORST_FIRST.index(finding.severity) for finding in sorted_out]
    assert severities == sorted(severities)
    explained = {cause for finding in found if finding.severity != "ok" for cause in finding.explains}
    assert {finding.cause for finding in sorted_out} == {finding.cause for finding in found} - explained


@settings(max_examples=8)
@given(st.integers(40, 60), st.data())
def test_of_many_machines_some_ways_were_tried_and_one_that_nobody_reaches_is_named(count, data):
    survey = healthy(count)
    tried = {(host, other) for host, others in connections_to_try(survey.hosts).items() for other in others}
    survey.reach = {pair: found for pair, found in survey.reach.items() if pair in tried}
    assert choose_addresses(survey.facts, survey.reach) == survey.chosen
    lost = data.draw(st.sampled_from(survey.hosts))
    for (one, two), (attempt,) in survey.reach.items():
        if lost in (one, two):
            survey.reach[one, two] = (Attempt(attempt.address, "timeout", port=4711),)
    (finding,) = (found for found in examine(survey) if found.severity == "fail")
    assert (finding.check, finding.hosts[0]) == ("reach", lost)
