"""Forks the agents and commands that a test starts: one process has imported torch for all of them.

Each fork enters the namespaces of the process that asked for it (forks/sitecustomize.py), and has its folder, variables
and streams.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import platform
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

FORKS, SOURCE = Path(__file__).with_name("forks"), Path(__file__).parents[1] / "src"
NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}  # with CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET
BYTES, READY = 1 << 20, b"ready\n"


@functools.cache
def fork_variables():
    """Starts this process's fork server, which ends with it; the variables that make agents and commands its forks."""
    folder = Path(tempfile.mkdtemp(prefix="manyhands-fork-server-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server", "manyhands.cluster.agents.agent", str(listener.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"},  # as commands set it
    )  # fmt: skip
    listener.close()
    assert process.stdout.readline() == READY
    atexit.register(_end_server, process, folder, os.getpid())
    paths = os.pathsep.join([str(FORKS), str(SOURCE)])
    return {"PYTHONPATH": paths, "TEST_FORK_SERVER": str(folder / "socket")}


def _end_server(process, folder, starter):
    if os.getpid() == starter:  # not a fork of it, which has inherited this
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def serve_forks(listener):
    """Forks until the process that started this one has ended."""
    selector, living = selectors.DefaultSelector(), {}
    selector.register(sys.stdin, selectors.EVENT_READ, ("end", 0))
    selector.register(listener, selectors.EVENT_READ, ("asked", 0))
    while True:
        for key, _ in selector.select():
            what, child = key.data
            if what == "end":
                return
            if what == "asked":
                asking, _ = listener.accept()
                if not (child := _fork(asking)):
                    asking.close()
                    continue
                living[child] = asking
                with contextlib.suppress(OSError):  # killed meanwhile, which the selector says next
                    asking.send(f"{child:8}".encode())
                selector.register(asking, selectors.EVENT_READ, ("gone", child))
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, ("ended", child))
            elif what == "ended":
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with living.pop(child) as asking, contextlib.suppress(OSError):
                    if asking in selector.get_map():
                        selector.unregister(asking)
                    asking.send(str(code).encode())
            elif child in living:  # the process that asked has been killed
                selector.unregister(key.fileobj)
                os.kill(child, signal.SIGKILL)


def _fork(asking):
    """Forks an agent or a command in the place of the process that asks; its process id, 0 if that was killed."""
    said, numbers, _, _ = socket.recv_fds(asking, BYTES, 3)
    while not said.endswith(b"\0\0") and (more := asking.recv(BYTES)):
        said += more
    if child := os.fork() if said.endswith(b"\0\0") else -1:
        for number in numbers:
            os.close(number)
        return max(child, 0)
    try:
        _become(asking, said[:-2].decode(errors="surrogateescape").split("\0"), numbers)
    except Exception:  # noqa: BLE001 - the fork is to end here, whatever it is
        traceback.print_exc()
    os._exit(1)


def _become(asking, place, numbers):
    pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    others = [number for name, number in NAMESPACES.items() if _namespace("self", name) != _namespace(pid, name)]
    if others and ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(pid), sum(others)):
        raise OSError(ctypes.get_errno(), "setns")
    for target, number in enumerate(numbers):
        os.dup2(number, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    folder, what, count, *rest = place
    words, variables = rest[: int(count)], rest[int(count) :]
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in variables)
    os.chdir(folder)
    platform._uname_cache = None  # a host of a lab has a name of its own
    _serve(words) if what == "agent" else _command(words)


def _serve(words):
    agent = importlib.import_module("manyhands.cluster.agents.agent")
    if agent.EARLY in words:
        agent.import_early()
    agent.serve()


def _command(words):
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, 1, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    code = 0
    atexit._clear()  # what the fork server's modules have registered
    try:
        importlib.import_module("manyhands.cli.main").main(words)
    except SystemExit as ended:
        code = ended.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _namespace(pid, name):
    return Path(f"/proc/{pid}/ns/{name}").readlink()


def main():
    from manyhands.cluster.agents.protocol import ELASTIC
    from manyhands.worker.entry import import_training

    importlib.import_module(ELASTIC)
    import_training()
    ours = "cli.main cli.train run.train train.precision cluster.doctor.facts models.build"
    for name in ("torchvision", *(f"manyhands.{each}" for each in ours.split())):
        importlib.import_module(name)
    os.write(1, READY)
    serve_forks(socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    main()
