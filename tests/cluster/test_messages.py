"""Messages between a head and its machines: they arrive typed, and what isn't one of ours is one clear error."""

import json
import math
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from manyhands.cluster import messages
from manyhands.cluster.agents import connection
from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.early import AGENT
from manyhands.cluster.agents.machines import _start_process, open_local_agent
from manyhands.cluster.agents.protocol import FilePiece, OpenRun, WorkerExited, WorkersEnded
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.hosts.inventory import Machine
from manyhands.core.records import Event, Failure, append
from manyhands.core.run_folder import RunFolder

RECORD = Failure(time=1.0, rank=1, host="n2", pid=3, error="E", what="w", hints=["m"])
HELLO = messages.call(Agent.hello, FactsWanted(only=("name",)), True)
MESSAGES = (
    messages.Alive(),
    messages.Call("bind", {"address": "::1"}),
    messages.CallResult({"cores": 2, "load": [0.5, math.inf]}),
    WorkersEnded({0: {"status": "finished"}}, {1: -9}, {1: "the end"}, "n1", [RECORD]),
    WorkerExited(1, 2, "n2", RECORD),
    FilePiece("metrics.jsonl", "{}\n", 4),
    messages.RequestFailed("no", "n1", ("do this",)),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_arrives_under_its_number_and_may_come_in_pieces(message):
    line, lines = messages.encode(message, 7), messages.MessageStream()
    assert line.count(b"\n") == 1
    assert lines.take(line[:5]) == []
    assert lines.take(line[5:] + line[:9]) == [(7, message)]
    assert lines.take(line[9:]) == [(7, message)]


def test_a_greeting_of_the_other_shell_is_no_message():
    assert not any(map(messages.decode, (b"", b"Welcome to n2!", b"[1, 2]", b"\xff")))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (b'{"v": 1', "a message can't be read"),
        (b'{"v": 1, "id": ' + b"9" * 50 + b"}", "a message can't be read"),
        ({"v": messages.VERSION + 1}, f"protocol version {messages.VERSION + 1}, expected {messages.VERSION}"),
        (b'{"kind": "error", "what": "do"}', f"protocol version unknown, expected {messages.VERSION}"),
        ({"is": "Dance"}, "unknown message type 'Dance'"),
        ({"is": ["Call"]}, "unknown message type"),
        ({"is": "Request"}, "unknown message type"),
        ({"with": {}}, "Call.method: Field required"),
        ({"with": {"method": "bind", "arguments": [1]}}, "Call.arguments: "),
        ({"with": {"method": "bind", "arguments": {}, "dance": True}}, "Call.dance: "),
        ({"with": None}, "Call: "),
        ({"is": "WorkersSeen", "with": {"host": "n1", "ranks": ["junk"]}}, "WorkersSeen.ranks.0: "),
    ],
)
def test_what_is_not_one_of_ours_is_one_clear_error(changed, said):
    sent = json.loads(messages.encode(messages.call(Agent.bind, "::1").call, 3))
    number, message = messages.decode(
        changed if isinstance(changed, bytes) else json.dumps({**sent, **changed}).encode()
    )
    assert (number, type(message)) == (0 if isinstance(changed, bytes) else 3, messages.Misunderstood)
    assert said in message.what
    assert "install the same version of manyhands on all machines" in message.hints


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("bind", {}, "bind.address: Field required"),
        ("bind", {"address": "::1", "port": "ssh"}, "bind.port: "),
        ("bind", {"address": "::1", "dance": True}, "bind.dance: "),
        ("keep_records", {"folder": "/r", "pieces": [{"name": "a"}]}, "keep_records.pieces.0.text: "),
        ("dance", {}, "unknown method 'dance'"),
        ("tick", {}, "unknown method 'tick'"),
        ("_send_records", {}, "unknown method"),
        ("__init__", {}, "unknown method"),
        ("wire", {}, "unknown method"),
    ],
)
def test_only_remote_methods_are_called_and_with_arguments_that_fit(method, arguments, said):
    with pytest.raises(messages.InvalidCallError, match=re.escape(said)):
        messages.perform(Agent.__new__(Agent), messages.Call(method, arguments))


@pytest.fixture
def agent_here(tmp_path):
    link = open_local_agent(tmp_path / "agent.log")
    yield link
    connection.close_all([link])


def test_agent_refuses_unknown_messages_and_continues(agent_here, tmp_path):
    agent_here.unsent += messages.encode(messages.Alive()).replace(f'"v": {messages.VERSION}'.encode(), b'"v": 0')
    with pytest.raises(connection.MisunderstoodError, match="localhost: invalid message: protocol version 0"):
        agent_here.ask(HELLO, 30)
    with pytest.raises(connection.MisunderstoodError, match="localhost: invalid message: unknown method 'tick'"):
        agent_here.ask(messages.Request(messages.Call("tick", {}), Agent.unlisten), 30)
    # A checkpoint that is only in the records isn't on the machine: they may be copies of another machine's.
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.job.write_text("")
    append(folder.events, Event(time=1.0, kind="saved", step=40))
    opened = messages.call(Agent.open_run, OpenRun(str(folder.path), "t", "h", "id"))
    assert agent_here.ask(opened, 30).saved == -1
    (folder.checkpoints / "step-00000030").mkdir(parents=True)
    assert agent_here.ask(opened, 30).saved == 30


# Stands in for ssh: the agent has one socket for its input and output, as sshd gives it.
LINE = """
import os, select, socket, subprocess, sys
ours, theirs = socket.socketpair()
agent = subprocess.Popen(sys.argv[1:], stdin=theirs, stdout=theirs)
theirs.close()
while True:
    ready = select.select([0, ours] if len(sys.argv) else [ours], [], [])[0]
    if ours in ready:
        received = ours.recv(1 << 16)
        if not received:
            sys.exit(agent.wait())
        os.write(1, received)
    if 0 in ready:
        received = os.read(0, 1 << 16)
        ours.sendall(received)
        if not received:
            ours.shutdown(socket.SHUT_WR)
            sys.argv.clear()
"""


@pytest.fixture
def line(tmp_path):
    """A conversation with an agent elsewhere, whose connection can be killed."""
    log = tmp_path / "agent.log"

    def connect(words):
        return _start_process([sys.executable, "-c", LINE, sys.executable, *words], log)

    link = connection.AgentConnection(Machine("n2"), connect(AGENT), log, here=False)
    link.connect_again = connect
    yield link
    connection.close_all([link])


def agent_of(line):
    line.ask(HELLO, 30)
    (agent,) = psutil.Process(line.process.pid).children()
    return agent


def test_link_resumes_over_a_new_connection_without_lost_or_repeated_messages(line):
    agent = agent_of(line)
    for _ in range(2):
        before, number = line.process, line.post(HELLO)
        before.kill()  # the request or its answer may be lost with it
        numbers = [number, line.post(HELLO)]  # so may this one
        reported, until = [], time.monotonic() + 15
        while not (len(reported) > 1 and line.connected and line.process is not before) and time.monotonic() < until:
            line.heartbeat()
            for link in connection.wait_for_links([line], 0.1):
                reported += link.read()
        assert [(answered, type(message)) for answered, message in reported] == [
            (each, messages.CallResult) for each in numbers
        ]
        assert line.process is not before
    before = line.process
    threading.Timer(0.5, before.kill).start()  # while the agent imports torch, and hears nobody
    assert line.ask(messages.call(Agent.prepare_workers, 1, 1, "cpu"), 60) == ("cpu", 1)
    assert line.process is not before
    assert agent.is_running()
    connection.close_all([line])
    agent.wait(10)  # its head has left, which is not a connection that was lost


def test_a_message_that_begins_behind_the_word_of_reconnection_is_complete(line):
    """The agent sends both in one stream, which a read may end anywhere in."""
    agent_of(line)
    message = messages.encode(messages.CallResult(7), 9)
    ours, theirs = os.pipe()
    before, line.fileno = line._lines.received, lambda: ours
    for piece in (messages.encode(messages.Reconnected(0)) + message[:10], message[10:]):
        os.write(theirs, piece)
        os.set_blocking(ours, False)
        found = line.read()
    del line.fileno
    assert [number for number, _ in found] == [9]
    assert line._lines.received == before + 1


def test_a_forked_worker_holds_no_socket_of_its_agents_connection(tmp_path):
    wire = connection.Wire(1)
    wire.listen(tmp_path)
    wire._passed_by, _ = sockets = socket.socketpair()
    held = [wire._listener.fileno(), wire._passed_by.fileno()]
    if not (child := os.fork()):
        os._exit(sum(Path(f"/proc/self/fd/{descriptor}").exists() for descriptor in held))
    assert os.waitpid(child, 0)[1] == 0
    for each in (wire._listener, *sockets):
        each.close()


def test_an_agent_that_has_ended_is_not_waited_for(line):
    agent_of(line).kill()
    began = time.monotonic()
    with pytest.raises(connection.LinkClosed, match="n2 is lost"):
        line.ask(HELLO, 30)
    assert time.monotonic() - began < 10
