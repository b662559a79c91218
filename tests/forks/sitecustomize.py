"""Replaces an agent, or a command, by a fork of the process of tests.fork_server.

Python imports this at its start. The process stays, as the child of the process that started it, for as long as the
fork runs: it forwards four signals and the exit code, and when one of the two ends, so does the other.
"""

import os
import sys

_AGENT = "manyhands.cluster.agents.agent"


def _run_in_fork(module, *arguments):
    errors = os.dup(2)
    try:
        code = _exit_code_of_fork(module, *arguments)
    except BaseException as error:  # noqa: BLE001 - raised, Python would start the real program
        os.write(errors, f"tests.fork_server: {error!r}\n".encode())
        code = 1
    os._exit(code)


def send_request(server, module, arguments, variables):
    """Asks the fork server to run a module here, with these variables and the streams 0 to 2 of this process."""
    import socket

    mask = os.umask(0)
    os.umask(mask)
    request = [os.getcwd(), str(mask), module, str(len(arguments)), *arguments]  # noqa: PTH109
    request += [f"{name}={value}" for name, value in variables.items()]
    socket.send_fds(server, ["\0".join([*request, "", ""]).encode(errors="surrogateescape")], [0, 1, 2])


def _exit_code_of_fork(module, *arguments):
    import contextlib
    import signal
    import socket

    def forward(number, _):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(fork, number)

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["TEST_FORK_SERVER"])
        with open("/proc/self/comm", "w") as name:  # noqa: PTH123
            name.write("fork-client")
        if module == _AGENT:
            del os.environ["TEST_FORK_SERVER"]
        send_request(server, module, arguments, os.environ)
        for number in range(3):
            os.close(number)
        fork = int(server.recv(8))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, forward)
        code = int(server.recv(8) or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if "TEST_FORK_SERVER" in os.environ:
    if sys.orig_argv[1:4] == ["-P", "-m", _AGENT]:
        _run_in_fork(_AGENT, *sys.orig_argv[4:])
    elif sys.orig_argv[1:3] == ["-m", "manyhands"]:
        _run_in_fork("manyhands", *sys.orig_argv[3:])
    elif os.path.basename("".join(sys.orig_argv[1:2])) == "manyhands":  # noqa: PTH119
        _run_in_fork("manyhands", *sys.orig_argv[2:])
