"""Has a fork of the process of tests.fork_server take the place of an agent, or of a command.

Python imports this at its start. The process stays, as the child of who started it, for as long as the fork runs: it
passes signals on, and when one of them ends, so does the other.
"""

import os
import sys

_AGENT = ["-P", "-m", "manyhands.cluster.agents.agent"]


def _wait_for_fork(what, *words):
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(os.environ["TEST_FORK_SERVER"])
        except OSError as error:  # Python would go on, and start what is to be a fork
            raise SystemExit(f"no fork server: {error}") from None
        if what == "agent":
            del os.environ["TEST_FORK_SERVER"]
        place = [os.getcwd(), what, str(len(words)), *words]  # noqa: PTH109
        place += [f"{name}={value}" for name, value in os.environ.items()]
        socket.send_fds(server, ["\0".join([*place, "", ""]).encode(errors="surrogateescape")], [0, 1, 2])
        for number in range(3):
            os.close(number)
        fork = int(server.recv(8))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(fork, number))
        code = int(server.recv(8) or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "TEST_FORK_SERVER" in os.environ:
    if sys.orig_argv[1:4] == _AGENT:
        _wait_for_fork("agent", *sys.orig_argv[4:])
    elif sys.orig_argv[1:3] == ["-m", "manyhands"]:
        _wait_for_fork("command", *sys.orig_argv[3:])
    elif os.path.basename("".join(sys.orig_argv[1:2])) == "manyhands":  # noqa: PTH119
        _wait_for_fork("command", *sys.orig_argv[2:])
