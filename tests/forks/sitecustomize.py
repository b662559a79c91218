"""Has a fork of the nursery (tests.nursery) take the place of an agent.

Python imports this at its start. The agent's process stays, as the child of who started it, for as long as the fork
runs: when one of them ends, so does the other.
"""

import os
import sys

_NURSERY = os.environ.pop("MANYHANDS_TEST_NURSERY", "")
if _NURSERY and sys.orig_argv[1:4] == ["-P", "-m", "manyhands.cluster.agents.agent"]:
    import socket

    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(_NURSERY)
        variables = (f"{name}={value}" for name, value in os.environ.items())
        place = [os.getcwd(), "early" if sys.orig_argv[4:] else "now", *variables, "", ""]  # noqa: PTH109
        socket.send_fds(nursery, ["\0".join(place).encode(errors="surrogateescape")], [0, 1, 2])
        for number in range(3):
            os.close(number)
        code = int(nursery.recv(8) or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
