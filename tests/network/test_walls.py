"""What a neighbour on the network reaches while a job runs on several hosts, and what it can do there."""

import json

import pytest

from tests.e2e.command import finish, run, running, wait_until
from tests.network.test_launch import ENDLESS, SHORT, begun, gone, here, hosts

pytestmark = pytest.mark.timeout(300)
__all__ = ["here"]


def listening(lab, host):
    """Addresses and ports on which anything in a host listens, sshd left out."""
    rows = [line.split() for line in lab.run(host, ["ss", "-Htlnp"]).splitlines()]
    return {row[3] for row in rows if not row[3].endswith(":22")}


def outside(lab, host):
    return {place for place in listening(lab, host) if not place.startswith("127.")}


@pytest.mark.slow
def test_the_store_is_on_loopback_and_only_collectives_listen_between_machines(lab, here):
    with running("launch", *ENDLESS, *hosts(lab), "--out", "run") as process:
        wait_until(begun("run"), process)
        for host in lab.hosts:
            places = outside(lab, host)
            # One for each process: the collectives of the job itself; none on another address.
            assert all(place.startswith(f"{lab.address(host)}:") for place in places), places
            assert listening(lab, host) - places, "the store, or the way to it"
        process.send_signal(2)
        assert finish(process).code == 75
    gone(lab)
    for host in lab.hosts:
        assert not listening(lab, host)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["AllowTcpForwarding no", "GatewayPorts yes"])
def test_where_ssh_forwards_nothing_safe_the_store_is_open_and_that_is_said(lab, here, rule):
    write = lab._write_sshd_config

    def stricter(*words):
        path = write(*words)
        path.write_text(path.read_text() + rule + "\n")
        return path

    lab._write_sshd_config = stricter
    lab.start(2)
    ended = run("launch", *SHORT, *hosts(lab), "--out", "run")
    assert ended.code == 0, ended.err
    assert f"so the store listens on {lab.address(1)} port" in ended.err
    assert rule.split()[0] in ended.err
    gone(lab)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["n1,n2", "n2,n1"])
def test_the_head_may_be_any_of_the_machines(lab, here, names):
    """Where it is another than the first, its own processes come to the store by a port of its own loopback."""
    command = [lab.python, "-m", "manyhands", "launch", *SHORT, "--hosts", names, "--cluster.ssh", lab.ssh]
    said = lab.run(1, [*command, "--out", here / "run", "--json"], cwd=here)
    assert json.loads(said)["status"] == "finished"
    gone(lab)
