"""What a neighbor on the network reaches while a job runs on several hosts, and what it can do there."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.command import done, events, read, stop, training, wait_until
from tests.network.runs import ENDLESS, SHORT, begun, gone, hosts, listening, steps, trained_on, typed_on
from tests.network.stranger import FORGED

pytestmark = pytest.mark.timeout(300)
STRANGER = Path(__file__).with_name("stranger.py")


def outside(lab, host):
    return {place for place in listening(lab, host) if not place.startswith("127.")}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["AllowTcpForwarding no", "GatewayPorts yes"])
def test_where_ssh_forwards_nothing_safe_the_store_is_open_and_that_is_said(lab, here, rule):
    lab.start(2, sshd=rule)
    says = (f"so the store listens on {lab.address(1)} port", rule.split()[0])
    done("launch", SHORT, hosts(lab), "--out run", says=says)
    gone(lab)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["n1,n2", "n2,n1"])
def test_the_head_may_be_any_of_the_machines(lab, here, names):
    """Where it is another than the first, its own processes come to the store by a port of its own loopback."""
    command = [lab.python, "-m", "manyhands", "launch", *SHORT.split(), "--hosts", names, "--cluster.ssh", lab.ssh]
    said = lab.run(1, [*command, "--out", here / "run", "--json"], cwd=here)
    assert json.loads(said)["status"] == "finished"
    assert [entry["here"] for entry in read("run", "machines.json")] == [name == "n1" for name in names.split(",")]
    gone(lab)


def attacked(lab, here, *targets):
    """What of two hosts lets a stranger on the third in; everything that listens there is tried at each address."""
    places = []
    for host in targets:
        ports = {place.rpartition(":")[2] for place in listening(lab, host)}
        places += [f"{lab.address(host)}:{port}" for port in ports]
    said = lab.run(3, [lab.python, STRANGER, here, *sorted(places)])
    return {place for place, entered in json.loads(said).items() if entered}


def still_trains(here, process):
    before = len(steps())
    wait_until(lambda: len(steps()) > before + 10, process)
    assert not (here / "executed").exists()
    assert not list(events("run", "restarted"))


@pytest.mark.slow
def test_a_stranger_comes_in_nowhere_while_a_machine_joins_and_launched_processes_train(lab, here):
    """What listens changes while a machine joins, so it is looked for and tried again and again."""
    ssh = ["--set", f"cluster.ssh={lab.ssh}"]
    with training("launch", ENDLESS, "--hosts n1 --out run", ssh) as process:
        wait_until(begun("run"), process)
        with training("join run --host n2") as joins:
            while joins.poll() is None:
                assert not attacked(lab, here, 1, 2)
            assert joins.returncode == 0
        trained_on(2, process)
        assert not attacked(lab, here, 1, 2)
        # One for each process: the collectives of the job itself; none on another address.
        assert all(place.startswith(f"{lab.address(host)}:") for host in (1, 2) for place in outside(lab, host))
        reported = json.loads(done("doctor --hosts n1,n2 --exposure --json", ssh).out)
        for host, ports in reported["open"].items():
            named = {f"{port['address']}:{port['port']}" for port in ports}
            assert outside(lab, int(host[1:])) <= named
            assert not [port for port in ports if port["lets_in"] and not port["address"].startswith("127.")]
        assert f"a free port of {lab.address(2)} (eth0)" in " ".join(reported["then"])
        still_trains(here, process)
        ended = stop(process, signal.SIGINT)
        assert FORGED not in ended.err + ended.out
    gone(lab)
    assert not [place for host in lab.hosts for place in listening(lab, host)]


@pytest.mark.slow
def test_a_stranger_at_the_meeting_by_hand_is_put_out_before_it_can_forge_a_failure(lab, here):
    init = f"{lab.address(1)}:29555"
    words = ("train", ENDLESS, f"--init tcp://{init} --world-size 2 --out", here / "run", "--rank")
    early = lab.exec(3, [lab.python, STRANGER, here, "--wait", init], stdout=subprocess.PIPE, text=True)
    first = typed_on(lab, 1, *words, 0)
    wait_until((here / "inside").exists, first)
    second = typed_on(lab, 2, *words, 1)
    wait_until(begun("run"), first)
    inside = f"{lab.address(3)}:"
    wait_until(lambda: inside not in lab.run(1, ["ss", "-Htn", "state", "established"]), first)
    (here / "go").touch()
    said = json.loads(early.communicate(timeout=60)[0])
    assert said["wrote"] is False, said
    assert not attacked(lab, here, 1, 2)
    still_trains(here, first)
    for ended in [stop(process, signal.SIGINT) for process in (first, second)]:
        assert FORGED not in ended.err + ended.out
