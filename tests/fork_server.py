"""Forks agents, commands and ranks for tests from one process that has imported torch.

Each fork runs the module as `python -m` does, in the namespaces, folder, variables and streams of the process that
forks/sitecustomize.py has replaced. It differs in what it has inherited: imported modules, the seed of hashes, one
thread for OpenMP. Where that matters, a test starts its agents (fixture `forks` of tests/network).
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import platform
import runpy
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

from manyhands.cluster.agents.early import AGENT
from manyhands.core.choices import module_names
from tests.forks.sitecustomize import send_request

FORKS, SOURCE = Path(__file__).with_name("forks"), Path(__file__).parents[1] / "src"
NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000}  # with CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET
# What torch's wrappers, optimizers and checkpoints import when they are first used, and what we do.
IMPORTED_LATE = (
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.elastic.agent.server",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "manyhands.data.datasets.synthetic",
    "manyhands.parallel.split.network", "manyhands.sync.local", "manyhands.sync.powersgd", "manyhands.sync.measure",
)  # fmt: skip
BYTES, READY, REQUEST_S = 1 << 20, b"ready\n", 5
NAME = Path("/proc/self/comm")  # as `ps` shows it, by which tests tell server, clients, agents and commands apart


@functools.cache
def fork_variables():
    """Starts the fork server of this process; returns the variables that make agents and commands its forks."""
    folder = Path(tempfile.mkdtemp(prefix="manyhands-fork-server-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    process = subprocess.Popen(
        # The doctor knows agents by the word in their command line, which a fork inherits.
        [sys.executable, "-m", "tests.fork_server", AGENT[-1], str(listener.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"},  # as commands set it
        start_new_session=True,
    )  # fmt: skip
    atexit.register(_end_server, process, folder, os.getpid())
    listener.close()
    assert process.stdout.readline() == READY
    paths = os.pathsep.join([str(FORKS), str(SOURCE)])
    return {"PYTHONPATH": paths, "TEST_FORK_SERVER": str(folder / "socket")}


@functools.cache
def import_for_commands():
    """Imports once what each command, its agent and its workers would import."""
    from manyhands.cluster.agents.protocol import ELASTIC
    from manyhands.worker.entry import import_training

    importlib.import_module(ELASTIC)
    import_training()
    ours = "cli.main cli.train run.train train.precision cluster.doctor.facts models.build models.architectures.mlp"
    for name in ("torchvision", *(f"manyhands.{each}" for each in f"{ours} data.datasets.published".split())):
        importlib.import_module(name)


@functools.cache
def import_late_modules():
    """Imports these modules once, because it would take seconds in each forked process."""
    modes = "manyhands.parallel.modes"
    for name in (*IMPORTED_LATE, *(f"{modes}.{mode}" for mode in module_names(modes))):
        importlib.import_module(name)


def request_fork(module, arguments):
    """Has a module run in a fork, which ends when the returned socket is closed; its exit code comes by the socket."""
    variables = {**os.environ, **fork_variables()}
    server = socket.socket(socket.AF_UNIX)
    server.connect(variables.pop("TEST_FORK_SERVER"))
    send_request(server, module, [*map(str, arguments)], variables)
    server.recv(8)
    return server


def _end_server(process, folder, starter):
    if os.getpid() == starter:  # not a fork of it, which has inherited this
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that a test left may hold the pipe open
            process.wait(10)
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def serve_forks(listener):
    """Forks until the process that started this one has ended; kills the forks then."""
    selector, clients = selectors.DefaultSelector(), {}
    selector.register(sys.stdin, selectors.EVENT_READ, ("end", 0))
    selector.register(listener, selectors.EVENT_READ, ("request", 0))
    while True:
        for key, _ in selector.select():
            event, child = key.data
            if event == "end":
                for child in clients:
                    os.kill(child, signal.SIGKILL)
                return
            if event == "request":
                client, _ = listener.accept()
                if not (child := _fork(client)):
                    client.close()
                    continue
                clients[child] = client
                with contextlib.suppress(OSError):  # the client has exited; the end of its stream is handled below
                    client.send(f"{child:8}".encode())
                selector.register(client, selectors.EVENT_READ, ("client exit", child))
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, ("child exit", child))
            elif event == "child exit":
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with clients.pop(child) as client, contextlib.suppress(OSError):
                    if client in selector.get_map():
                        selector.unregister(client)
                    client.send(str(code).encode())
            elif child in clients:
                selector.unregister(key.fileobj)
                os.kill(child, signal.SIGKILL)


def _fork(client):
    """Forks for a client; the child's process id, or 0 if the client has exited or its request doesn't come."""
    client.settimeout(REQUEST_S)
    streams = []
    try:
        request, streams, _, _ = socket.recv_fds(client, BYTES, 3)
        while not request.endswith(b"\0\0") and (more := client.recv(BYTES)):
            request += more
    except TimeoutError:
        request = b""
    if child := os.fork() if request.endswith(b"\0\0") else -1:
        for stream in streams:
            os.close(stream)
        return max(child, 0)
    try:
        _run(client, request[:-2].decode(errors="surrogateescape").split("\0"), streams)
    except BaseException:  # noqa: BLE001 - the fork is to end here
        traceback.print_exc()
    os._exit(1)


def _run(client, request, streams):
    """Runs a module in the client's place."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout = (open(number, mode, closefd=False) for number, mode in enumerate("rw"))  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    spaces = [{Path(f"/proc/{each}/ns/{name}").readlink() for each in ("self", pid)} for name in NAMESPACES]
    others = [number for number, two in zip(NAMESPACES.values(), spaces, strict=True) if len(two) == 2]
    if others and ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(pid), sum(others)):
        raise OSError(ctypes.get_errno(), "setns")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    folder, mask, module, count, *words = request
    arguments, variables = words[: int(count)], words[int(count) :]
    os.umask(int(mask))
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in variables)
    os.chdir(folder)
    platform._uname_cache = None  # a host of a lab has a name of its own
    NAME.write_text(module.rpartition(".")[2])
    sys.argv = [module, *arguments]
    atexit._clear()  # what the fork server's modules have registered
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def main():
    import_for_commands()
    import_late_modules()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    del sys.path[0]  # the folder of the tests, which isn't there for what `python -P` starts
    NAME.write_text("fork-server")
    os.write(1, READY)
    serve_forks(socket.socket(fileno=int(sys.argv[2])))
    os._exit(0)  # without a word from the libraries that modules have loaded


if __name__ == "__main__":
    main()
