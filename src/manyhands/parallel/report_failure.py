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

from manyhands.core.world import ProcessInfo

# A rank 0 that is there answers within this time.
REPORT_S = 3.0


def report_to_waiting_ranks(process_info: ProcessInfo, report: Callable[[Any], None]) -> None:
    """Has `report` write into the store under present/<attempt>, where somebody is there and answers soon."""
    thread = threading.Thread(target=_report, args=(process_info, report), daemon=True)
    thread.start()
    thread.join(REPORT_S)


def _report(process_info: ProcessInfo, report: Callable[[Any], None]) -> None:
    with contextlib.suppress(dist.DistError, ValueError, OSError):
        report(dist.PrefixStore(f"present/{process_info.attempt}", _store(process_info)))


def _store(process_info: ProcessInfo) -> Any:
    url = urlparse(process_info.init)
    if url.scheme == "file":
        path = Path(url.netloc + url.path)
        if not path.stat().st_size:
            raise OSError(f"no process listens at {path}")
        return dist.FileStore(str(path), process_info.size)
    host, port = url.hostname or os.environ.get("MASTER_ADDR", ""), url.port or int(os.environ.get("MASTER_PORT", "0"))
    # Where nobody listens, torch itself would try again and again.
    socket.create_connection((host, port), timeout=REPORT_S).close()
    return dist.TCPStore(host, port, None, False, timedelta(seconds=REPORT_S), False)
