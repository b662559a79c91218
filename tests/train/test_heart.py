"""What a process does that is told to give up waiting for others."""

import subprocess
import sys

PROGRAM = """
import socket
from manyhands.train.status import shut_connections
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
shut_connections()
assert near.recv(1) == far.recv(1) == b"", "who waits for another hears nothing"
socket.create_connection(listener.getsockname()).close()
listener.accept()  # gloo ends the whole process where this fails
"""


def test_connections_end_and_what_listens_goes_on():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
