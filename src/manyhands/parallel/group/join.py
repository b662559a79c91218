"""Joins and leaves the group of processes: store, rendezvous, device, backend, and the cause of a failure.

Used under every launcher: manyhands' own agent, torchrun, tcp://, file://, environment variables.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from manyhands.core.devices import accelerator, require_device, resolve_device_type
from manyhands.core.errors import EXIT_FAILED, PeerError, UserError
from manyhands.core.world import ProcessInfo, World
from manyhands.parallel.group import listeners, ports, rendezvous
from manyhands.parallel.group.tunnel_ends import tunnel_ends

Say = Callable[[str], None]

ANSWER_S = 20.0  # a listener that doesn't answer within this time is no store
ABORT_S = 5.0  # aborting a backend may block too
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the interfaces that gloo and NCCL listen on
LISTEN_S = 0.5
LEARN_S = 2.0  # seconds that a process waits for the cause after it has lost a peer
PATIENCE_S = 5.0  # seconds to exit after a peer's failure that collectives don't detect, as with NCCL


class FailureBroadcast:
    """Publishes the run's first failure to all processes through rank 0's store, and listens for it in a thread.

    `leave` ends a process whose main thread is blocked in a collective. The thread calls it with the failure, or with
    None if the store is lost. gloo needs no `leave`, because closed connections end its collectives.
    """

    def __init__(
        self, store: Any, attempt: int, leave: Callable[[rendezvous.PeerFailure | None], None] | None = None
    ) -> None:
        self._store, self._leave = dist.PrefixStore(f"failure/{attempt}", store), leave
        self._heard: rendezvous.PeerFailure | None = None
        self._known, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def publish(self, failure: rendezvous.PeerFailure) -> None:
        """Publishes the failure of this process, unless another process has already published one."""
        text = failure.model_dump_json()
        with contextlib.suppress(dist.DistError):
            if not rendezvous.parse_message(self._store.compare_set("text", "", text), rendezvous.PeerFailure):
                self._store.set("text", text)  # replaces an invalid message

    def wait_for_failure(self) -> rendezvous.PeerFailure | None:
        """Waits up to LEARN_S seconds for the published failure. Returns None if no failure is published by then."""
        self._known.wait(LEARN_S)
        return self._heard

    def close(self, readers: int = 0) -> None:
        """Stops listening, after `readers` processes have read the failure, but at most LINGER_S seconds later."""
        if readers:
            rendezvous.wait_for_count(self._store, "heard", readers)
        self._over.set()
        self._thread.join(LEARN_S)

    def _listen(self) -> None:
        with contextlib.suppress(dist.DistError):
            while not self._heard and not self._over.wait(LISTEN_S):
                if self._store.check(["text"]) and (
                    found := rendezvous.parse_message(self._store.get("text"), rendezvous.PeerFailure)
                ):
                    self._heard = found
                    self._known.set()
                    self._store.add("heard", 1)
        if self._leave and not self._over.wait(PATIENCE_S):
            self._leave(self._heard)


@dataclass
class JoinedGroup:
    """The process group as `join` returns it: rank and device of this process, and the store of all processes."""

    world: World  # rank, size and device of this process
    store: Any = None  # for small messages between processes
    init_file: Path | None = None  # of file://; removed at the end, because the next run could not use it
    holds_store: bool = False  # True on the process that holds the store
    cause: FailureBroadcast | None = None  # receives another process's failure; None until `listen`
    earlier_groups: tuple[Any, ...] | None = None  # as `join` found them; None if it created the default group
    # each process's record at the rendezvous, by rank
    present: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def listen(self, attempt: int, leave: Callable[[rendezvous.PeerFailure | None], None] | None = None) -> None:
        """Starts a `FailureBroadcast`, which launchers without agents need. `leave` is passed to it."""
        if self.store is not None and not self.world.alone:
            self.cause = FailureBroadcast(self.store, attempt, leave)

    def abort(self) -> None:
        """Aborts collectives and exits. Called from another thread while a collective blocks the main thread."""
        threading.Timer(ABORT_S, os._exit, (EXIT_FAILED,)).start()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        os._exit(EXIT_FAILED)

    def leave(self, *, failed: bool = False) -> None:
        """Destroys the groups created since `join`. If `failed`, waits until other processes have read the failure."""
        if self.earlier_groups is None:
            if dist.is_initialized():
                dist.destroy_process_group()
        elif not failed or self.world.device == "cpu":  # NCCL might block after a failure
            for group in process_groups():
                if group not in self.earlier_groups:
                    dist.destroy_process_group(group)
        if self.cause:
            self.cause.close(self.world.size if failed and self.holds_store else 0)
        if self.init_file:
            # A process that still writes to the store after rank 0 has removed the file would create it again.
            with contextlib.suppress(dist.DistError, RuntimeError):
                if not failed and self.init_file.exists():
                    self.store.add("left", 1)
            if self.world.is_main:
                rendezvous.wait_for_count(self.store, "left", 0 if failed else self.world.size)
                self.init_file.unlink(missing_ok=True)


def join(process_info: ProcessInfo, digest: str, collective_timeout_s: float, say: Say) -> JoinedGroup:
    """Joins this process to the process group of the run. A collective.

    `digest` is a text with the version and the options, which must be equal on all processes. Collectives fail after
    `collective_timeout_s` seconds without an answer of a peer. `say` prints a message to the user. Raises PeerError if
    a rank is missing, and UserError for an unusable address, a duplicate rank or a process of another job.
    """
    if process_info.started_by == STARTED_BY:
        return _join_existing(process_info, digest, say)
    device = _choose_device(process_info)
    if process_info.size == 1 and not process_info.init:
        _set_current_device(device)
        return JoinedGroup(World(device=device))
    store = _open_store(process_info, digest, say)
    if process_info.agent_store:
        store = run_store(store, process_info.rank, process_info.attempt)
    present = rendezvous.exchange_records(store, process_info, digest, say)
    if process_info.started_by == "--init":
        process_info = _with_local_rank(process_info, present)
        device = _choose_device(process_info)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // process_info.local_size))
    elif "OMP_NUM_THREADS" not in os.environ and process_info.started_by != "manyhands":
        # If a launcher has bound this process to some cores, torch counts only these.
        share = (os.cpu_count() or 1) // process_info.local_size
        torch.set_num_threads(max(1, min(torch.get_num_threads(), share)))
    backend = _choose_backend(process_info, device)
    interface = set_collective_interface(process_info, present)
    _set_current_device(device)
    with listeners.block_listeners_on_exit(backend):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"group/{process_info.attempt}", store),
            rank=process_info.rank,
            world_size=process_info.size,
            timeout=timedelta(seconds=collective_timeout_s),
        )
    place = (process_info.rank, process_info.size, process_info.local_rank, process_info.local_size)
    world = World(*place, device, str(dist.get_backend()), collective_timeout_s)
    for line in describe_open_ports(process_info, interface):
        say(line)
    if process_info.started_by in {"--init", "met"} and not world.is_main:
        say(f"rank {world.rank} of {world.size} has joined; rank 0 prints the progress")
    holds_store = process_info.rank == 0 and not process_info.agent_store
    return JoinedGroup(world, store, rendezvous.init_path(process_info), holds_store, present=present)


def _join_existing(process_info: ProcessInfo, digest: str, say: Say) -> JoinedGroup:
    before, store = tuple(process_groups()), run_store(dist.distributed_c10d._get_default_store(), dist.get_rank())
    present = rendezvous.exchange_records(store, process_info, digest, say)
    process_info = _with_local_rank(process_info, present)
    device = _choose_device(process_info)
    _set_current_device(device)
    place = (process_info.rank, process_info.size, process_info.local_rank, process_info.local_size)
    world = World(*place, device, process_info.backend)
    return JoinedGroup(world, store, holds_store=process_info.rank == 0, earlier_groups=before, present=present)


def _set_current_device(device: str) -> None:
    if ":" in device and not device.startswith("cpu"):
        torch.accelerator.set_device_index(device)


def _with_local_rank(process_info: ProcessInfo, present: dict[int, dict[str, Any]]) -> ProcessInfo:
    """Returns a copy of `process_info` with the local rank and size that follow from the records of all ranks."""
    machines = [present[rank]["machine"] for rank in range(process_info.size)]
    here = [rank for rank, machine in enumerate(machines) if machine == machines[process_info.rank]]
    return replace(process_info, local_rank=here.index(process_info.rank), local_size=len(here))


def set_collective_interface(process_info: ProcessInfo, present: dict[int, dict[str, Any]]) -> str:
    """Sets the environment variables that name the network interface of gloo and NCCL. Returns gloo's interface.

    On one machine, it is loopback. On several, it is the interface that the environment already names, or that of the
    route to other machines ("" without a route). `present`: {rank: record}. Raises UserError for a missing interface.
    """
    here, loopback = present[process_info.rank]["machine"], ports.loopback_interface()
    others = [who for _, who in sorted(present.items()) if who["machine"] != here]
    if tunnel_ends():
        from manyhands.parallel.group.through_ssh import route_gloo_through_tunnels

        route_gloo_through_tunnels()
    if tunnel_ends() or not others:
        os.environ.update(dict.fromkeys(IFNAMES, loopback))
        return loopback
    if configured := os.environ.get(IFNAMES[0], ""):
        ports.require_interfaces(configured, IFNAMES[0])
    host = urlparse(process_info.init).hostname or os.environ.get("MASTER_ADDR", "")
    name = ports.route_interface(host) if host and host not in {"0.0.0.0", "::"} else ""
    if name in {"", loopback}:
        # By default the backends use the address of this machine's name, which is often loopback.
        name = ports.interface_to_addresses(address for who in others for address in who["addresses"])
    if name:
        for variable in IFNAMES:
            os.environ.setdefault(variable, name)
    return configured or name


def describe_open_ports(process_info: ProcessInfo, interface: str) -> list[str]:
    """Returns messages on ports that other hosts can reach. Returns [] if another process has to print the messages."""
    if process_info.local_rank or process_info.started_by == "manyhands":
        return []
    lines = [] if interface == ports.loopback_interface() else [ports.describe_collective_ports(interface)]
    if process_info.agent_store and process_info.started_by != "met":
        lines += ports.describe_launcher_ports(process_info.started_by)
    return lines


def _choose_device(process_info: ProcessInfo) -> str:
    kind = resolve_device_type(process_info.device, process_info.size)
    name, _, number = kind.partition(":")
    if name == "cpu":
        return kind
    if name == "mps":
        require_device(kind, "on an Apple computer, install torch for macOS")
        if process_info.size > 1:
            what = f"{process_info.size} processes can't communicate on mps, for which torch has no collectives"
            raise UserError(what, "cluster.device", ("start one process: -n 1", "or use --device cpu"))
        return name
    require_device(kind)
    if number:
        return kind
    count = torch.accelerator.device_count()
    index = process_info.device_index
    if index is None and process_info.local_size > count:
        what = f"{process_info.local_size} processes on this machine, but {count} {kind} devices"
        raise UserError(what, "-n", (f"start fewer processes: -n {count}", "or use --device cpu"))
    if index is not None and index >= count:
        what = f"this process is assigned {kind} device {index}, but the devices here are 0 to {count - 1}"
        hints = ("count only visible devices (CUDA_VISIBLE_DEVICES), from 0",)
        raise UserError(what, "DEVICE_ID or the cluster file", hints)
    return f"{kind}:{process_info.local_rank % count if index is None else index}"


def _choose_backend(process_info: ProcessInfo, device: str) -> str:
    backend = process_info.backend
    if backend == "auto":
        return dist.get_default_backend_for_device(device)
    supported = dist.Backend.backend_capability.get(backend, [])
    if not dist.is_backend_available(backend):
        what = f'this installation of torch has no backend "{backend}"'
    elif supported and device.partition(":")[0] not in supported:
        what = f"the backend {backend} is for {' and '.join(supported)}, but this process uses {device}"
    else:
        return backend
    raise UserError(what, "cluster.backend", ("remove cluster.backend to use the device's default",))


def _open_store(process_info: ProcessInfo, digest: str, say: Say) -> Any:
    timeout = timedelta(seconds=process_info.join_timeout_s)
    if path := rendezvous.init_path(process_info):
        return _file_store(path, process_info)
    host, port = rendezvous.store_address(process_info)
    if not host or not port:
        tcp = process_info.init.startswith("tcp:")
        what = f'"{process_info.init}" needs an address and a port'
        hints = ("--init tcp://10.0.0.1:23456" if tcp else "export MASTER_ADDR=10.0.0.1 MASTER_PORT=23456",)
        raise UserError(what, "--init" if tcp else "MASTER_ADDR and MASTER_PORT", hints)
    if process_info.rank == 0 and not process_info.agent_store:
        try:
            listener = ports.listen(host, port, _address_source(process_info))
        except ports.PortTakenError:
            # A rank 0 of this job that waits for the other ranks may hold the port.
            rendezvous.report_to_waiting_ranks(
                process_info, lambda store: rendezvous.report_duplicate_rank(store, process_info, digest)
            )
            raise
        if process_info.started_by != "manyhands":
            say(ports.describe_reachability(host, port))
        descriptor = listener.detach()
        return dist.TCPStore(host, port, None, True, timeout, False, master_listen_fd=descriptor)
    if host in {"0.0.0.0", "::"}:
        what = f"{host} is an address to listen on, not to connect to"
        raise UserError(what, "--init", ("give rank 0's address",))
    _wait_for_listener(host, port, process_info, say)
    return _connect(host, port, process_info)


def _address_source(process_info: ProcessInfo) -> str:
    return "--init" if process_info.started_by == "--init" else "MASTER_ADDR and MASTER_PORT"


def _connect(host: str, port: int, process_info: ProcessInfo) -> Any:
    """Connects to rank 0's store. Raises PeerError if the listener doesn't answer, where torch would wait forever."""
    found: list[Any] = []

    def connect() -> None:
        try:
            timeout = timedelta(seconds=process_info.join_timeout_s)
            found.append(dist.TCPStore(host, port, None, False, timeout, False))
        except (dist.DistError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(min(ANSWER_S, process_info.join_timeout_s))
    if not found or isinstance(found[0], Exception):
        reason = str(found[0]).partition("\n")[0] if found else "no answer"
        what = f"the program listening at {host}:{port} is not rank 0 of a run: {reason}"
        another = "if another program uses the port, choose another port on every process"
        hints = (another, f"find the program: ss -ltnp | grep {port}")
        raise PeerError(what, _address_source(process_info), hints)
    return found[0]


def _file_store(path: Path, process_info: ProcessInfo) -> Any:
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for the init file", "--init", ("use a shared folder",))
    if path.is_dir():
        raise UserError(f"{path} is a folder", "--init", (f"name a file: file://{path}/meet",))
    if path.is_file() and path.stat().st_size and not path.stat().st_mode & 0o200:
        raise UserError(f"{path} can't be written", "--init")
    store = dist.FileStore(str(path), process_info.size)
    store.set_timeout(timedelta(seconds=process_info.join_timeout_s))
    return store


def _wait_for_listener(host: str, port: int, process_info: ProcessInfo, say: Say) -> None:
    started, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            waited = time.monotonic() - started
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror):
                what = f"the name {host} has no address: {reason}"
                raise UserError(what, _address_source(process_info), ("give an IP address",)) from None
            if waited > process_info.join_timeout_s:
                what = f"rank {process_info.rank} can't reach rank 0 at {host}:{port}: {reason}"
                hints = ("check that rank 0 is running at that address", f"check the firewall: nc -zv {host} {port}")
                raise PeerError(what, _address_source(process_info), hints) from None
            if waited > process_info.join_warn_s and not warned:
                warned = True
                say(f"still waiting for rank 0 at {host}:{port} ({reason}), up to "
                    f"{process_info.join_timeout_s:.0f} s in total (cluster.join_timeout_s)")  # fmt: skip
            time.sleep(0.2)
        else:
            return


STARTED_BY = "its own process group"
INIT = "the existing process group"


def existing_process_info(device: str, backend: str) -> ProcessInfo | None:
    """Returns rank and size in torch's default group, or None without one. Raises UserError if `backend` is another."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    place, own = _device_and_backend(device)
    if backend not in {"auto", own}:
        what = f"cluster.backend is {backend}, but this process is already in a group with {own}"
        raise UserError(what, "cluster.backend", ("remove cluster.backend to use the existing group",))
    rank, size = dist.get_rank(), dist.get_world_size()
    return ProcessInfo(rank, size, init=INIT, backend=own, device=place, agent_store=True, started_by=STARTED_BY)


def _device_and_backend(wanted: str) -> tuple[str, str]:
    """Returns (device of this process, backend of the group for this device); the CPU if the only backend is gloo."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))  # such as "cpu:gloo,cuda:nccl"
    kind = accelerator()
    if wanted == "auto" and kind != "cpu" and backends.get(kind, "gloo") != "gloo":
        chosen = torch.accelerator.current_device_index()
        return (f"{kind}:{chosen}" if chosen else "auto"), backends[kind]
    device = "cpu" if wanted == "auto" else wanted
    return device, backends.get(device.partition(":")[0], str(dist.get_backend()))


def run_store(store: Any, rank: int, attempt: int = 0) -> Any:
    """Returns the store with a key prefix of this run, because several runs may share the store."""
    uses = store.add(f"manyhands/uses/{attempt}/{rank}", 1)  # all processes count their uses in the same order
    return dist.PrefixStore(f"manyhands/{uses}", store)


def process_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map)
