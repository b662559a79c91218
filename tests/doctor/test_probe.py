"""Probes over real sockets: who is reached, who is not, and nothing stays open."""

import json
import socket
import threading

import pytest

from manyhands.cluster.findings import Attempt
from manyhands.cluster.probe import Probe


@pytest.fixture
def probe():
    made = Probe()
    yield made
    made.close()


def ask(probe, **request):
    """As over a wire: plain JSON both ways."""
    return json.loads(json.dumps(probe.answer(json.loads(json.dumps(request)))))


def listen(probe, address="127.0.0.1"):
    return {"address": address, **ask(probe, do="listen", addresses=[address])["listeners"][address]}


def attempts(probe, *targets):
    answer = ask(probe, do="connect", targets=list(targets), timeout_s=2)
    return [Attempt.read(attempt) for attempt in answer["attempts"]]


def test_a_listener_is_reached_and_the_time_of_a_message_measured(probe):
    (attempt,) = attempts(probe, listen(probe))
    assert (attempt.result, attempt.local) == ("ok", "127.0.0.1")
    assert attempt.latency_ms > 0


def test_what_is_measured_went_through(probe):
    assert ask(probe, do="measure", target=listen(probe), seconds=0.2)["mbps"] > 1


def test_another_token_is_another_machine(probe):
    one, two = listen(probe), listen(probe)
    assert [a.result for a in attempts(probe, {**one, "token": two["token"]}, two)] == ["other", "ok"]
    assert "something else" in ask(probe, do="measure", target={**one, "token": "00" * 16}, seconds=0.2)["error"]


def test_a_program_that_speaks_first_is_another(probe):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(99)

        thread = threading.Thread(target=greet)
        thread.start()
        target = {"address": "127.0.0.1", "port": server.getsockname()[1], "token": "00" * 16}
        assert attempts(probe, target)[0].result == "other"
        thread.join()


def test_only_the_addresses_asked_for_are_listened_on(probe):
    target = listen(probe, "127.0.0.2")
    assert [a.result for a in attempts(probe, target, {**target, "address": "127.0.0.3"})] == ["ok", "refused"]


def test_nothing_stays_open(probe):
    before = threading.active_count()
    target = listen(probe)
    assert attempts(probe, target)[0].result == "ok"
    ask(probe, do="unlisten")
    assert attempts(probe, target)[0].result == "refused"
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(10)
    assert threading.active_count() <= before


def test_a_listener_that_nobody_closes_closes_itself(probe):
    target = {"address": "127.0.0.1", **ask(probe, do="listen", addresses=["127.0.0.1"], seconds=0.2)
              ["listeners"]["127.0.0.1"]}  # fmt: skip
    probe._open[0]._timer.join(10)
    assert attempts(probe, target)[0].result == "refused"


def test_an_address_that_is_not_ours_and_a_port_that_is_taken_are_said(probe):
    assert ask(probe, do="listen", addresses=["192.0.2.1"])["listeners"]["192.0.2.1"]["error"]
    taken = listen(probe)["port"]
    told = ask(probe, do="listen", addresses=["127.0.0.1"], port=taken)["listeners"]["127.0.0.1"]
    assert "in use" in told["error"]
    assert "python" in told["holder"] or "pytest" in told["holder"]


def test_an_unknown_request_is_refused(probe):
    with pytest.raises(ValueError, match="dance"):
        ask(probe, do="dance")
