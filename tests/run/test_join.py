"""The socket by which a run is asked for another machine."""

import contextlib
import os
import resource
import socket
import threading

import pytest

from manyhands.cluster.agents.protocol import WorkerCommand
from manyhands.cluster.hosts.formats import hostfile
from manyhands.cluster.hosts.this_process import machines_of, with_machines
from manyhands.cluster.messages import encode
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import RunError, UserError
from manyhands.run.launch import SOCKET, _short_path, join_listener, request_join


@pytest.fixture(params=["short", "long"])
def folder(request, tmp_path):
    """Also one whose path is longer than the system takes for a socket."""
    made = tmp_path / ("run" if request.param == "short" else "/".join(["x" * 100] * 3))
    made.mkdir(parents=True)
    (made / "job.toml").touch()
    return made


def served(folder, admit, asks):
    """What asking gives, while the head's loop goes round."""
    found = []

    def ask():
        try:
            found.append(asks())
        except (RunError, UserError) as error:
            found.append(error)

    with join_listener(folder, admit, pytest.fail) as tick:
        assert (folder / SOCKET).stat().st_mode & 0o777 == 0o600
        thread = threading.Thread(target=ask)
        thread.start()
        while not found:
            tick()
        thread.join()
    assert not (folder / SOCKET).exists()
    return found[0]


def test_join_request_is_answered_once_the_machine_takes_part(folder):
    asked = []

    def admit(machine, notify):
        asked.append(machine.target)
        notify(f"{machine.name} takes part", True)

    assert served(folder, admit, lambda: request_join(str(folder), "ssh://me@n4:31234")) == "n4:31234 takes part"
    assert asked == ["ssh://me@n4:31234"]


def test_who_can_not_come_is_refused_in_words(folder):
    def admit(machine, notify):
        raise UserError("enough take part")

    refusals = {"n4,n5": "join adds one machine at a time", "n4;reboot": "is not a host", "n4": "enough take part"}
    for host in (*refusals, "n4\nn5", "-oProxyCommand=x", "no more"):
        error = served(folder, admit, lambda host=host: request_join(str(folder), host))
        assert isinstance(error, RunError)
        assert refusals.get(host, "") in error.message
        assert "\n" not in error.message


def test_noise_at_the_socket_harms_nobody(folder):
    """Another program of the user's, and one that goes before it is answered."""

    def admit(machine, notify):
        notify("here", True)

    def ask():
        for noise in (os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", encode(WorkerCommand("stop"))):
            with socket.socket(socket.AF_UNIX) as head, short(folder) as path:
                head.connect(path)
                head.sendall(noise)
        return request_join(str(folder), "n4")

    assert served(folder, admit, ask) == "here"


def test_a_run_without_a_head_says_so_and_one_that_can_open_no_more_files_continues(folder):
    (folder / SOCKET).touch()
    with pytest.raises(UserError, match="the launcher of the run does not answer"):
        request_join(str(folder), "n4")
    with join_listener(folder, pytest.fail, pytest.fail) as tick, contextlib.ExitStack() as stack:
        path = stack.enter_context(short(folder))
        asking = stack.enter_context(socket.socket(socket.AF_UNIX))
        asking.connect(path)
        least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, most))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (least, most))
        tick()


def short(folder):
    return _short_path(folder / SOCKET)


@pytest.mark.parametrize("named", ["hosts", "hostfile", "file"])
def test_a_machine_that_has_joined_is_among_those_that_the_job_names(named, tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 port=2222\n")
    before = ClusterOptions(
        hosts=("n1:2", "ssh://n2:2222") if named == "hosts" else (),
        hostfile=str(tmp_path / "hosts") if named == "hostfile" else "",
    )
    assert with_machines(before, ()) == before
    for joined in ("n3", "me@n3", "n3:2", "me@[fd00::3]", "[fd00::3]:2", "ssh://me@[fd00::3]:2222"):
        machines = hostfile.read_list(joined, "--host").machines
        found = machines_of(with_machines(before, machines))
        assert found == ((*machines_of(before), *machines) if named != "file" else ())


def test_a_socket_that_can_not_be_made_is_a_warning(tmp_path):
    (tmp_path / SOCKET).mkdir()
    said = []
    with join_listener(tmp_path, pytest.fail, lambda text, level: said.append((text, level))) as tick:
        tick()
    assert [level for _, level in said] == ["WARNING"]
