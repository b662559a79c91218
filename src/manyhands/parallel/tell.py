"""Words for those that wait at a meeting place, from a process that can't take part."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from manyhands.core.world import Membership

# A rank 0 that is there answers within this time.
TELL_S = 3.0


def tell_those_who_wait(membership: Membership, tell: Callable[[Any], None]) -> None:
    """Has `tell` write into the store under present/<attempt>, where somebody is there and answers soon."""
    thread = threading.Thread(target=_tell, args=(membership, tell), daemon=True)
    thread.start()
    thread.join(TELL_S)


def _tell(membership: Membership, tell: Callable[[Any], None]) -> None:
    with contextlib.suppress(dist.DistError, ValueError, OSError):
        tell(dist.PrefixStore(f"present/{membership.attempt}", _store(membership)))


def _store(membership: Membership) -> Any:
    url = urlparse(membership.init)
    if url.scheme == "file":
        path = Path(url.netloc + url.path)
        if not path.stat().st_size:
            raise OSError(f"nobody is at {path}")
        return dist.FileStore(str(path), membership.size)
    host, port = url.hostname or os.environ.get("MASTER_ADDR", ""), url.port or int(os.environ.get("MASTER_PORT", "0"))
    # Where nobody listens, torch itself would try again and again.
    socket.create_connection((host, port), timeout=TELL_S).close()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=TELL_S), False)
