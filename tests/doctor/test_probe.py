"""Probes over real sockets: who is reached, who is not, and nothing stays open."""

import json
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from manyhands.cluster.doctor.probe import Listener, Probe
from manyhands.cluster.messages import CallResult, call, decode, encode, perform
from tests.e2e.command import run, wait_until


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


def test_without_hosts_a_job_opens_loopback_alone():
    told = run("doctor", "--exposure", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["then"] == [
        "train, fit and session open ports on loopback only, for users of this machine"
    ]
