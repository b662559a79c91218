"""Joins the group of processes: finds the store, says who is missing, refuses who doesn't fit, and leaves properly.

Every start (manyhands' own agent, torchrun, tcp://, file://, the environment) ends here. Before torch's own
initialisation each process writes its name into the store and waits for the others', so that a rank that is missing,
there twice, or of another job is named instead of waited for in silence.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from manyhands.core.errors import PeerError, UserError
from manyhands.core.world import Membership, World
from manyhands.parallel import ports

Say = Callable[[str], None]


@dataclass
class Group:
    """This process's place and the store that all processes share (None when it is alone)."""

    world: World
    store: Any = None
    init_file: Path | None = None

    def leave(self) -> None:
        """Destroys the process group, if there is one, and removes the init file, which would spoil the next run."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.init_file and self.world.speaks:
            self.init_file.unlink(missing_ok=True)


def join(membership: Membership, digest: str, collective_timeout_s: float, say: Say) -> Group:
    """Takes this process's place.

    Args:
        membership: how to join.
        digest: of what must be equal on all processes (versions, job); a difference is refused by name.
        collective_timeout_s: seconds after which a silent peer is given up.
        say: told what the user should know, such as what listens where.

    Raises:
        PeerError: somebody is missing, there twice, or differs.
        UserError: the address can't be used.
    """
    device = _device(membership)
    if membership.size == 1 and not membership.init:
        return Group(World(device=device))
    store = _open_store(membership, say)
    present = _check_in(store, membership, digest, say)
    backend = _backend(membership, device)
    _choose_interface(membership, [other["machine"] for other in present.values()])
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"group/{membership.attempt}", store),
        rank=membership.rank,
        world_size=membership.size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    world = World(
        membership.rank, membership.size, membership.local_rank, membership.local_size, device, str(dist.get_backend())
    )
    if membership.started_by == "--init" and not world.speaks:
        say(f"rank {world.rank} of {world.size} has joined; rank 0 shows the progress")
    url = urlparse(membership.init)
    return Group(world, store, Path(url.netloc + url.path) if url.scheme == "file" else None)


def _choose_interface(membership: Membership, machines: list[str]) -> None:
    """Has the collectives listen on the interface towards the others, or on loopback where all share one machine."""
    if len(set(machines)) == 1:
        name = ports.loopback_interface()
    else:
        host = urlparse(membership.init).hostname or os.environ.get("MASTER_ADDR", "")
        name = ports.interface_of(host) if host and host not in {"0.0.0.0", "::"} else ""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _device(membership: Membership) -> str:
    """This process's device: its own accelerator where there is one for each process on this machine."""
    kind = membership.device
    if kind == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = accelerator.type if accelerator else "cpu"
    if kind in {"cpu", "mps"} or ":" in kind:
        return kind
    if not torch.accelerator.is_available() or getattr(torch.accelerator.current_accelerator(), "type", "") != kind:
        raise UserError(f"there is no {kind} device here", "cluster.device", ("leave it out, or give --device cpu",))
    count = torch.accelerator.device_count()
    if membership.local_size > count:
        raise UserError(
            f"{membership.local_size} processes on this machine, and {count} {kind} devices",
            "-n",
            (f"-n {count}", "or --device cpu"),
        )
    return f"{kind}:{membership.local_rank % count}"


def _backend(membership: Membership, device: str) -> str:
    if membership.backend != "auto":
        if not dist.is_backend_available(membership.backend):
            raise UserError(
                f'torch has no backend "{membership.backend}" here',
                "cluster.backend",
                ("leave it out: the device's own",),
            )
        return membership.backend
    return dist.get_default_backend_for_device(device)


def _open_store(membership: Membership, say: Say) -> Any:
    timeout = timedelta(seconds=membership.join_timeout_s)
    url = urlparse(membership.init)
    if url.scheme == "file":
        return _file_store(Path(url.netloc + url.path), membership)
    if url.scheme == "tcp":
        host, port = url.hostname or "", url.port or 0
    else:
        host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0") or 0)
    if not host or not port:
        raise UserError(f'"{membership.init}" needs an address and a port', "--init", ("tcp://10.0.0.1:23456",))
    if membership.rank == 0 and not membership.agent_store:
        listener = ports.listen(host, port)
        if membership.started_by != "manyhands":
            say(ports.describe_exposure(host, port))
        descriptor = listener.detach()
        return dist.TCPStore(host, port, None, True, timeout, False, master_listen_fd=descriptor)
    if host in {"0.0.0.0", "::"}:
        raise UserError(
            f"{host} is no address to connect to: it means rank 0's own machine", "--init", ("give rank 0's address",)
        )
    _wait_for_listener(host, port, membership, say)
    return dist.TCPStore(host, port, None, False, timeout, False)


def _file_store(path: Path, membership: Membership) -> Any:
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for the init file", "--init", ("make it on a shared disk",))
    if path.is_dir():
        raise UserError(f"{path} is a folder", "--init", (f"name a file: file://{path}/meet",))
    if path.is_file() and path.stat().st_size and not path.stat().st_mode & 0o200:
        raise UserError(f"{path} can't be written", "--init")
    store = dist.FileStore(str(path), membership.size)
    store.set_timeout(timedelta(seconds=membership.join_timeout_s))
    return store


def _wait_for_listener(host: str, port: int, membership: Membership, say: Say) -> None:
    started, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            waited = time.monotonic() - started
            reason = error.strerror or str(error)
            if waited > membership.join_timeout_s or isinstance(error, socket.gaierror):
                raise PeerError(
                    f"rank {membership.rank} can't reach rank 0 at {host}:{port}: {reason}",
                    "--init",
                    ("is rank 0 started, and the address right?", f"is a firewall between? try: nc -zv {host} {port}"),
                ) from None
            if waited > membership.join_warn_s and not warned:
                warned = True
                say(f"still waiting for rank 0 at {host}:{port} ({reason}); giving up after "
                    f"{membership.join_timeout_s:.0f} s (cluster.join_timeout_s)")  # fmt: skip
            time.sleep(0.2)
        else:
            return


def _check_in(store: Any, membership: Membership, digest: str, say: Say) -> dict[int, dict[str, Any]]:
    """Writes this process's name into the store and waits until everybody's is there and fits."""
    names = dist.PrefixStore(f"present/{membership.attempt}", store)
    me = {
        "host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(),
        "size": membership.size, "digest": digest,
        "torch": torch.__version__, "python": platform.python_version(), "time": time.time(),
    }  # fmt: skip
    if names.add(f"count/{membership.rank}", 1) > 1:
        raise _place_taken(names, membership)
    names.set(str(membership.rank), json.dumps(me))
    present = _wait_for_names(names, membership, say)
    for rank, other in present.items():
        _compare(membership.rank, me, rank, other)
    return present


def _machine() -> str:
    """Equal for processes that share one network stack: one boot of one machine, one network namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())  # noqa: PTH115
    return " ".join(parts)


def _wait_for_names(names: Any, membership: Membership, say: Say) -> dict[int, dict[str, Any]]:
    started, warned = time.monotonic(), False
    present: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(membership.size):
            if rank not in present and names.check([str(rank)]):
                present[rank] = json.loads(names.get(str(rank)))
                if present[rank]["size"] != membership.size:
                    return present
        missing = [rank for rank in range(membership.size) if rank not in present]
        if not missing:
            return present
        waited = time.monotonic() - started
        text = f"{len(present)} of {membership.size} processes are here; missing: rank {_ranges(missing)}"
        if waited > membership.join_timeout_s:
            raise PeerError(
                f"{text}, after {waited:.0f} s",
                membership.init,
                (
                    "start the missing ranks with the same --init and --world-size",
                    "cluster.join_timeout_s waits longer",
                ),
            )
        if waited > membership.join_warn_s and not warned:
            warned = True
            say(f"{text}; giving up after {membership.join_timeout_s:.0f} s (cluster.join_timeout_s)")
        time.sleep(0.01 if waited < 5 else 0.2)


def _compare(my_rank: int, me: dict[str, Any], rank: int, other: dict[str, Any]) -> None:
    words = {"size": "--world-size", "torch": "torch's version", "digest": "the job (flags or job.toml)"}
    for key, word in words.items():
        if me[key] != other[key]:
            shown = f": {me[key]} here, {other[key]} there" if key != "digest" else ""
            raise PeerError(
                f"rank {my_rank} on {me['host']} and rank {rank} on {other['host']} differ in {word}{shown}",
                mend=("start all ranks with the same command, but for --rank",),
            )


def _place_taken(names: Any, membership: Membership) -> PeerError:
    """Another process has this rank: a second start, or an earlier run's init file."""
    other: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        if names.check([str(membership.rank)]):
            other = json.loads(names.get(str(membership.rank)))
    who = f" by process {other['pid']} on {other['host']}" if other else ""
    if membership.init.startswith("file://"):
        path = membership.init.removeprefix("file://")
        return PeerError(
            f"the init file {path} already has a rank {membership.rank}, written{who}",
            "--init",
            (
                f"left by an earlier run? then: rm {path}, or use a new name",
                "or are two processes started with one --rank?",
            ),
        )
    return PeerError(
        f"rank {membership.rank} is taken{who}",
        "--rank",
        (f"give each process its own --rank, 0 to {membership.size - 1}",),
    )


def _ranges(ranks: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank if rank is not None else -1
    return ", ".join(parts)


def say_on_stderr(text: str) -> None:
    """The plain way of telling the user."""
    sys.stderr.write(f"manyhands: {text}\n")
    sys.stderr.flush()
