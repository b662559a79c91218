"""Faults planted in a lab of hosts are found and named by the doctor's command, run from the laptop."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import done, start, wait_until
from tests.network.runs import gone


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a job, which all hosts see unless a test mounts another over it."""
    folder = tmp_path / "job"
    (folder / "runs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def doctor(lab, *job, hosts="n1,n2,n3", fails=()):
    """What the command says as JSON; the checks that fail, with their hosts, are these."""
    words = (
        "doctor",
        *(job or ["digits", "mlp"]),
        "--hosts",
        hosts,
        "--json --set",
        f"cluster.ssh={lab.ssh}".split("!"),
    )
    reported = json.loads(done(*words, by=start, code=3 if fails else 0).out.splitlines()[-1])
    found = [(finding["check"], finding["hosts"]) for finding in reported["findings"] if finding["severity"] == "fail"]
    assert sorted(found) == sorted(fails)
    assert bool(reported["fails"]) == bool(fails)
    return reported


def of(reported, check):
    """A check's findings that aren't `ok`."""
    return [f for f in reported["findings"] if f["check"] == check and f["severity"] != "ok"]


def no_traces(lab):
    """No process stays on a host, and no file of the doctor's; both may take a moment to go."""
    gone(lab)
    # Doctors of tests that run at the same time have folders of their own.
    there = set(Path("/tmp").glob("manyhands-doctor-*"))
    wait_until(lambda: not there & set(Path("/tmp").glob("manyhands-doctor-*")), patience=60)


@pytest.mark.slow
def test_a_healthy_lab_and_what_was_tried_in_it(lab, here):
    for host in lab.hosts:  # the same on each, and a trap: who connects to it reaches himself
        lab.add_dummy(host, "docker0", "172.17.0.1/16")
    reported = doctor(lab)
    assert reported["addresses"] == {
        n: {"interface": "eth0", "address": lab.address(h)} for h, n in enumerate(lab.names, 1)
    }
    assert [f["check"] for f in reported["findings"] if f["check"] == "collective"] == ["collective"]
    assert {one: set(row) for one, row in reported["mbps"].items()} == {n: set(lab.names) - {n} for n in lab.names}
    assert all(-1 < offset < 1 for offset in reported["clock_s"].values())
    assert not of(reported, "links") + of(reported, "interface") + of(reported, "names") + of(reported, "reach")
    assert list((here / "runs").iterdir()) == []
    no_traces(lab)


@pytest.mark.slow
def test_faults_that_only_slow_down_or_mislead(lab, here, tmp_path):
    lab.add_dummy(1, "wan0", "192.168.55.1/24", default=True)
    lab.set_names(2, own="127.0.1.1")
    lab.rate(3, "10mbit", ways=("sent",))
    plant(tmp_path / "late", "import time\nreal = time.time\ntime.time = lambda: real() + 90.0\n")
    lab.start(2, environment=with_path(lab, tmp_path / "late"))
    reported = doctor(lab)
    (interface,), (name,), (link,), (clock,) = (
        of(reported, check) for check in ("interface", "names", "links", "clock")
    )
    assert interface["hosts"] == ["n1"]
    assert "wan0" in interface["what"]
    assert name["hosts"] == ["n2"]
    assert "127.0.1.1" in name["what"]
    assert link["hosts"] == ["n3"]
    assert "asymmetric" in link["what"]
    assert 5 < reported["mbps"]["n3"]["n1"] < 15
    assert clock["what"].startswith("clocks differ: n2")
    no_traces(lab)


@pytest.mark.slow
def test_closed_ports_and_a_host_that_is_down(lab, here):
    lab.nft(2, firewall("tcp dport 1024-65535 drop"))
    lab.down(3)
    reported = doctor(lab, fails=[("contact", ["n3"]), ("reach", ["n2", "n1"])])
    (reach,) = of(reported, "reach")
    assert "does not respond" in reach["what"]
    assert "tcp dport 1024-65535 drop" in reach["hints"][0]
    no_traces(lab)


@pytest.mark.slow
def test_a_firewall_that_closes_the_port_of_the_job(lab, here):
    lab.nft(1, firewall("tcp dport 29500 drop"))
    reported = doctor(lab, f"digits mlp --set cluster.init=tcp://{lab.address(1)}:29500", fails=[("port", ["n1"])])
    assert "n3 can't connect (timeout)" in of(reported, "port")[0]["what"]


def test_ssh_that_refuses_that_does_not_know_the_user_and_a_changed_key(lab, here):
    lab.nft(1, firewall("tcp dport 22 reject with tcp reset"))
    config = lab.ssh_config.read_text()
    lab.ssh_config.write_text("Host n2\n  User nobody\n" + config)
    known = lab.folder / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join("other " + line.partition(" ")[2] if line.startswith("n3,") else line for line in lines))
    reported = doctor(lab, fails=[("contact", [name]) for name in lab.names])
    said = " | ".join(" ".join([finding["what"], *finding["hints"]]) for finding in reported["findings"])
    for words in ("n1 refuses ssh connections", "systemctl start ssh", "password", "ssh host key of n3 is unknown",
                  "ssh-keygen -R n3"):  # fmt: skip
        assert words in said


@pytest.mark.slow
def test_other_versions_data_code_and_small_places(lab, here, tmp_path):
    older = tmp_path / "older"
    plant(older, "")
    (older / "torch-2.1.0.dist-info").mkdir()
    (older / "torch-2.1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    for split in ("train", "val"):
        (tmp_path / "data/pets" / split / "cat").mkdir(parents=True)
        (tmp_path / "data/pets" / split / "cat/1.png").write_bytes(b"x")
    (here / "net.py").write_text("def net(): ...\n")
    other = tmp_path / "other"
    (other / "runs").mkdir(parents=True)
    (other / "net.py").write_text("def net(): return 1\n")
    lab.start(1, environment=with_path(lab, older))
    lab.start(2, prepare=f"mount -t tmpfs tmpfs {tmp_path}/data && mount -t tmpfs -o size=8m tmpfs /dev/shm")
    lab.start(3, prepare=f"mount --bind {other} {here} && mount -t tmpfs -o size=50m tmpfs {here}/runs")
    fails = [("code", "n3"), ("data", "n2"), ("disk", "n3"), ("memory", "n2"), ("versions", "n1")]
    reported = doctor(lab, tmp_path / "data/pets", "net.py:net", fails=[(check, [host]) for check, host in fails])
    (version,) = of(reported, "versions")
    assert version["hints"][0].startswith(f"ssh -F {lab.ssh_config} n1 {lab.python} -m pip install torch==")
    assert "net.py" in of(reported, "code")[0]["what"]
    assert str(tmp_path / "data/pets") in of(reported, "data")[0]["what"]


BROKEN_INSTALLATION = """
import sys
import time
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libcudart.so.12: cannot open shared object file")
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.slow
def test_only_the_collective_finds_a_torch_that_is_broken(lab, here, tmp_path):
    plant(tmp_path / "broken", BROKEN_INSTALLATION)
    lab.start(2, environment=with_path(lab, tmp_path / "broken"))
    reported = doctor(lab, hosts="n1,n2", fails=[("collective", ["n1", "n2"])])
    assert "libcudart.so.12" in of(reported, "collective")[0]["what"]
    no_traces(lab)


def firewall(rule):
    return f"table inet closed {{ chain arriving {{ type filter hook input priority 0; {rule}; }}; }}\n"


def plant(folder, sitecustomize):
    """A folder that Python looks into first, as a second environment would be."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(sitecustomize)


def with_path(lab, folder):
    return {"PYTHONPATH": f"{folder}:{lab.environment['PYTHONPATH']}"}
