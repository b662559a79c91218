"""What of manyhands listens on this machine, and what else does not count."""

import json
import socket
import subprocess
import sys

from manyhands.cluster.doctor.probe import Probe
from tests.e2e.command import run

LISTENS = (
    "import socket,sys; one = socket.create_server(('127.0.0.1', 0)); print(one.getsockname()[1], flush=True); input()"
)


def listening(*words):
    return subprocess.Popen(
        [sys.executable, "-c", LISTENS, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_only_what_processes_of_manyhands_listen_on_is_named():
    with listening("manyhands.worker.entry") as ours, listening("another") as theirs, socket.create_server(("", 0)):
        port, other = int(ours.stdout.readline()), int(theirs.stdout.readline())
        found = {each.port: each for each in Probe().open_ports()}
        assert found[port].address == "127.0.0.1"
        assert found[port].lets_in
        assert found[port].pid == ours.pid
        assert other not in found
        ours.communicate("")
        theirs.communicate("")


def test_without_hosts_a_job_opens_loopback_alone():
    told = run("doctor", "--exposure", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["then"] == [
        "train, fit and session open ports on loopback only, for users of this machine"
    ]
