"""Every planted fault is found, named, and is the only one; a healthy cluster has none."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.doctor import findings
from manyhands.cluster.doctor.findings import Attempt, DoctorFinding, Needs, examine, sort_out
from manyhands.cluster.doctor.survey import choose_addresses, connections_to_try
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import RunError
from manyhands.run.doctor import all_reduce_finding
from tests.doctor.planted import GIB, change, gpu, healthy

MIB = 1 << 20


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


def test_what_to_type_on_another_machine_has_the_users_ssh_its_port_and_user():
    survey = healthy(3, Needs(reach={"n2": "ssh -F mine -p 31234 root@n2"}))
    survey.clock_s["n2"] = (100.0, 0.01)
    assert only(survey).hints == ("synchronize the clock: ssh -F mine -p 31234 root@n2 sudo timedatectl set-ntp true",)


def test_two_names_of_one_machine():
    survey = healthy(3)
    change(survey, "n2", "machine", survey.facts["n1"]["machine"])
    finding = only(survey)
    assert (finding.check, finding.severity, finding.hosts) == ("twice", "fail", ("n1", "n2"))
    assert finding.what == "n1 and n2 are the same machine"
    assert finding.hints == ('list the machine once, with 2 processes: "n1 slots=2"',)


FACTS = [
    # what is planted, its value, check, severity, words of the finding
    ("name/addresses", ["127.0.1.1"], "names", "warn", ["127.0.1.1", "n2"]),
    ("name/addresses", ["::1"], "names", "warn", ["::1"]),
    ("name/addresses", ["10.0.0.77"], "names", "warn", ["10.0.0.77", "not an address of"]),
    ("default_interface", "docker0", "interface", "warn", ["docker0", "eth0", "n2"]),
    ("environment/GLOO_SOCKET_IFNAME", "docker0", "interface", "warn", ["GLOO_SOCKET_IFNAME=docker0", "eth0"]),
    ("versions/torch", "2.14.0", "versions", "fail", ["n2 has torch 2.14.0", "but n1 and n3 have 2.15.0"]),
    ("versions/torchvision", "0.28.0", "versions", "warn", ["torchvision 0.28.0"]),
    ("versions/manyhands", "0.0.9", "versions", "fail", ["manyhands 0.0.9"]),
    ("versions/nccl", "2.29.1", "versions", "fail", ["nccl 2.29.1"]),
    ("package", "bbbb", "versions", "fail", ["the source files of manyhands", "n2"]),
    ("python/version", "3.12.1", "versions", "warn", ["3.12.1", "3.11.7"]),
    ("compiler", False, "versions", "warn", ["C++ compiler", "missing on n2"]),
    ("data/exists", False, "data", "fail", ["the data /data is missing on n2"]),
    ("data/hash", "0000", "data", "fail", ["n2 has 10 files", "n1 has 10 files", "names or sizes"]),
    ("memory/free", 100 * MIB, "memory", "warn", ["100 MiB on n2"]),
    ("places/run folder/free", 5 * MIB, "disk", "fail", ["n2 5 MiB"]),
    ("places/run folder/free", GIB, "disk", "warn", ["n2 1024 MiB"]),
    ("places/run folder/writable", False, "disk", "fail", ["ada has no write permission for /job on n2"]),
    ("load", 7.5, "cpu", "warn", ["cores are busy", "7.5 on the 8 cores of n2"]),
    ("environment/OMP_NUM_THREADS", "64", "cpu", "warn", ["1 × 64 on the 8 cores of n2"]),
    ("errors/firewall", "TimeoutExpired: nft", "facts", "warn", ["firewall", "TimeoutExpired"]),
    ("errors/accelerators", "nvidia-smi says: mismatch", "accelerators", "fail", ["n2", "mismatch"]),
    ("jobs", [{"pid": 7, "user": "bob", "command": "torchrun x.py", "parent": 1}], "jobs", "warn", ["bob", "torchrun"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "check", "severity", "words"), FACTS)
def test_a_planted_fact_is_found_and_named(path, value, check, severity, words):
    survey = healthy()
    change(survey, "n2", path, value)
    finding = only(survey)
    assert (finding.check, finding.severity, finding.hosts) == (check, severity, ("n2",))
    assert all(word in finding.what for word in words), finding.what


def test_a_torchvision_for_another_torch_is_named_where_no_version_is_known():
    survey = healthy()
    change(survey, "n2", "torchvision", "torchvision 0.1.0 is for torch 2.1.0")
    del survey.facts["n2"]["versions"]
    finding = only(survey)
    assert finding.what == "n2: torchvision 0.1.0 is for torch 2.1.0"
    assert finding.hints[0] == "ssh n2 /usr/bin/python3 -m pip install torch torchvision"


def test_a_full_disk_is_answered_on_the_machine_that_has_it():
    survey = healthy()
    change(survey, "n1", "places/run folder/free", GIB)
    change(survey, "n2", "places/run folder/free", 0)
    finding = only(survey)
    assert (finding.severity, finding.hosts) == ("fail", ("n1", "n2"))
    assert finding.hints[:2] == ("check the disk: ssh n2 df -h /job", "check the disk: ssh n1 df -h /job")


def test_small_shared_memory_by_how_small_it_is():
    for free, severity in ((64 * MIB, "warn"), (MIB, "fail")):
        survey = healthy()
        change(survey, "n3", "places/shm/free", free)
        assert (only(survey).severity, only(survey).hosts) == (severity, ("n3",))
        assert "shm-size" in only(survey).hints[0]


def test_a_different_torch_is_one_finding_with_the_command_that_mends_it():
    survey = healthy()
    older = {"manyhands": "0.1.0", "torch": "2.14.0", "torchvision": "0.28.0", "nccl": "2.29.1", "numpy": "2.4.6"}
    change(survey, "n2", "versions", older)
    assert only(survey).hints == ("ssh n2 /usr/bin/python3 -m pip install torch==2.15.0",)


def test_code_names_the_files_and_fails_only_a_job_that_uses_them():
    for uses, severity in ((True, "fail"), (False, "warn")):
        survey = healthy(needs=Needs(files=("net.py",) if uses else ()))
        change(survey, "n3", "code/hash", "other")
        change(survey, "n3", "code/files", {"net.py": "zz", "job.toml": "bb", "more.py": "cc"})
        assert only(survey).severity == severity
        assert "more.py, net.py" in only(survey).what
    survey = healthy()
    change(survey, "n3", "code", {"exists": False, "path": "/job"})
    assert wrong(survey) == []
    survey.needs = Needs(files=("net.py",))
    assert "/job, is missing on n3" in only(survey).what


def test_a_named_data_set_that_will_be_fetched_is_no_failure():
    survey = healthy(needs=Needs(download=True))
    change(survey, "n2", "data", {"kind": "named", "path": "/data/mnist", "exists": False})
    assert only(survey).severity == "warn"
    survey.needs = Needs(download=False)
    assert only(survey).severity == "fail"


def test_accelerators():
    survey = healthy(needs=Needs(device="cuda", processes={"n1": 2, "n2": 2, "n3": 2}))
    for host in survey.hosts:
        survey.facts[host]["accelerators"] = [gpu(0), gpu(1)]
    assert wrong(survey) == []
    survey.facts["n2"]["accelerators"] = [gpu(0)]
    assert "n2 has 1 for 2" in only(survey).what
    survey.needs = Needs()
    survey.facts["n2"]["accelerators"] = []
    assert "cpu on n2, cuda elsewhere" in only(survey).what
    user = {"pid": 12, "used_mib": 90000, "name": "python"}
    survey.facts["n2"]["accelerators"] = [gpu(0, used_mib=90000, processes=[user]), gpu(1)]
    assert "process 12" in only(survey).what
    survey.needs = Needs(device="cpu")
    assert wrong(survey) == []


def blind(survey, host, **seen):
    survey.facts[host]["torch_devices"] = {"count": 0, "built_for": "CUDA 13.2", "version": "2.15.0", "said": ""} | seen


def test_an_accelerator_that_cannot_be_used_is_named_with_its_mend():
    survey = healthy(1)
    survey.facts[host := "n1"]["accelerators"] = [gpu(0)]
    blind(survey, host, said="The NVIDIA driver on your system is too old")
    finding = only(survey)
    assert finding.severity == "warn"
    assert all(words in finding.what for words in ("torch can't use", "too old", "use the CPU"))
    assert "13.2" in finding.hints[0]
    blind(survey, host, built_for="", version="2.15.0+cpu")
    assert "is a CPU build" in only(survey).what
    blind(survey, host, count=1)
    assert wrong(survey) == []


def test_an_ascend_card_that_cannot_be_used_needs_torch_npu():
    survey = healthy(1)
    survey.facts["n1"]["accelerators"] = [gpu(0, kind="npu", name="Ascend", memory_mib=0, used_mib=0)]
    blind(survey, "n1", built_for="", version="2.15.0+cpu")
    finding = only(survey)
    assert "1 accelerator(s) (Ascend) that torch can't use; training" in finding.what
    assert finding.hints[0] == "install torch-npu for torch 2.15.0: pip install torch-npu"


def test_a_card_without_a_driver_is_named_with_its_mend():
    survey = healthy(1)
    survey.facts[host := "n1"]["cards"] = [{"vendor": "NVIDIA", "address": "0000:01:00.0"}]
    blind(survey, host)
    finding = only(survey)
    assert "0000:01:00.0" in finding.what
    assert "without a working driver" in finding.what
    assert "install the NVIDIA driver" in finding.hints[0]
    survey.needs = Needs(device="cuda")
    assert {found.severity for found in wrong(survey)} == {"fail"}
    survey.needs = Needs(device="cpu")
    assert wrong(survey) == []
    survey.needs = Needs()
    survey.facts[host]["environment"] = {"CUDA_VISIBLE_DEVICES": ""}
    assert wrong(survey) == []


def test_a_machine_that_cannot_be_asked_is_one_finding():
    survey = without(healthy(), "n2")
    survey.errors["n2"] = RunError("n2 can't be reached", "n2", ("is it switched on?",))
    survey.collective = all_reduce_finding(survey, "n2 did not come", ("n2",))
    finding = only(survey)
    assert (finding.check, finding.what, finding.hosts) == ("contact", "n2 can't be reached", ("n2",))


def without(survey, host):
    for table in (survey.facts, survey.chosen, survey.clock_s):
        table.pop(host)
    for table in (survey.reach, survey.mbps, survey.latency_ms):
        for pair in [pair for pair in table if host in pair]:
            table.pop(pair)
    return survey


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


@given(st.sets(st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1]), min_size=1))
def test_every_pair_that_fails_is_in_a_finding(pairs):
    survey = healthy(4)
    for pair in pairs:
        survey.reach[pair] = (Attempt("10.0.0.1", "timeout", port=4711),)
    found = wrong(survey)
    assert findings.fails(found)
    assert all(any(set(pair) <= set(finding.hosts) for finding in found) for pair in pairs)
    assert len(found) <= len(pairs)


def test_rules_of_a_firewall_are_cited():
    survey = healthy()
    change(survey, "n3", "firewall", ["tcp dport 1024-65535 drop"])
    for one in ("n1", "n2"):
        survey.reach[one, "n3"] = (Attempt("10.0.0.3", "timeout", port=4711),)
    assert "tcp dport 1024-65535 drop" in only(survey).hints[0]


def test_a_port_that_is_taken():
    survey = healthy(needs=Needs(port=29500))
    survey.port_errors["n1"] = "Address already in use, by python (process 7)"
    assert "process 7" in only(survey).what


@given(hosts, st.floats(0.5, 100))
def test_a_slow_machine_is_blamed_once_and_an_asymmetric_one_said_so(host, mbps):
    for ways in ((0,), (1,), (0, 1)):
        survey = healthy(4)
        survey.mbps = {pair: mbps if any(pair[way] == host for way in ways) else 941.0 for pair in survey.mbps}
        finding = only(survey)
        assert (finding.check, finding.severity, finding.hosts) == ("links", "warn", (host,))
        assert ("asymmetric" in finding.what) == (len(ways) == 1)


def test_a_slow_machine_whose_receiving_could_not_be_measured():
    survey = healthy(4)
    survey.mbps = {pair: 9.5 if pair[0] == "n2" else mbps for pair, mbps in survey.mbps.items() if pair[1] != "n2"}
    assert only(survey).what == "the link of n2 is slow: sends 9.5 Mbit/s"


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


def test_a_network_that_is_slow_everywhere_and_one_that_is_far():
    survey = healthy(3)
    survey.mbps = dict.fromkeys(survey.mbps, 9.5)
    assert "the network is slow" in only(survey).what
    survey = healthy(2)
    survey.latency_ms["n1", "n2"] = 80.0
    assert "80 ms" in only(survey).what


@given(hosts, st.floats(2, 1e6), st.booleans())
def test_clocks_apart(host, by, ahead):
    survey = healthy(4)
    survey.clock_s[host] = (by if ahead else -by, 0.01)
    assert only(survey).hosts == (host,)
    survey.clock_s[host] = (survey.clock_s[host][0], by)
    assert wrong(survey) == []


@pytest.mark.parametrize(
    ("needs", "plant", "severity", "words"),
    [
        (Needs(), lambda survey: survey.chosen.pop("n2"), "fail", "n2 has no address"),
        (Needs(interface="ib0"), str, "fail", "the interface ib0 is missing"),
        (Needs(), lambda one: setattr(one, "collective", all_reduce_finding(one, "no device")), "fail", "no device"),
        (Needs(processes={"n1": 4}, threads=4), str, "warn", "4 × 4 on the 8 cores of n1"),
    ],
)
def test_one_fault_of_the_survey_or_the_job_is_the_only_finding(needs, plant, severity, words):
    plant(survey := healthy(needs=needs))
    assert only(survey).severity == severity
    assert words in only(survey).what


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
    sorted_out = sort_out(found)
    assert len({finding.cause for finding in sorted_out}) == len(sorted_out)
    severities = [findings.WORST_FIRST.index(finding.severity) for finding in sorted_out]
    assert severities == sorted(severities)
    explained = {cause for finding in found if finding.severity != "ok" for cause in finding.explains}
    assert {finding.cause for finding in sorted_out} == {finding.cause for finding in found} - explained


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
