"""Ascend's rank table, versions 1.0 and 1.2, and the variables that name it to each process.

A machine's cards become its devices, in the order of their ranks. Where ranks are 0, 1, 2 … on cards 0, 1, 2 …, the
devices are left empty, as they are anywhere else.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from manyhands.cluster.descriptions.hccl_rules import check
from manyhands.cluster.descriptions.hccl_table import Device, RankTable, Server, typed, written
from manyhands.cluster.descriptions.inventory import Cluster, LauncherPlace, Machine, is_address
from manyhands.cluster.descriptions.located_json import at_line, parse
from manyhands.core.errors import UserError
from manyhands.core.shown import say

DEFAULT_PORT = 29500
POLL_S = 1.0

_OWN_NAME = re.compile(r"(rank_?table|^hccl).*\.json$")

HCCN = Path("/etc/hccn.conf")


def recognise(path: str, text: str) -> bool:
    """Whether it is a JSON object with a server_list, or a file named like one that is still being written."""
    return text.lstrip().startswith("{") and (
        bool(re.search(r'"(server_list|rank_list|group_list)"\s*:', text)) or bool(_OWN_NAME.search(Path(path).name))
    )


def read(text: str, where: str) -> Cluster:
    """Reads a completed table. Raises UserError: see `read_table`."""
    table = read_table(text, where)
    return Cluster(tuple(map(_machine, table.by_rank)), source=f"rank table {where}".rstrip())


def read_table(text: str, where: str) -> RankTable:
    """The table, checked, with what a Cluster has no place for. Raises UserError: it isn't whole, or breaks a rule."""
    document = parse(text, where)
    table = typed(document)
    if table.status == "initializing":
        what = 'status is "initializing": the table is still being written'
        raise UserError(what, document.at(("status",)), ("wait until whoever writes it sets it to completed",))
    check(table, document)
    return table


def wait(
    path: Path,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Waits until the table is completed, and returns its text.

    A file that is gone, cut off or "initializing" is still being written; any other mistake ends the waiting, and is
    left to the reader. Raises UserError: the table says that it is still being written, after all this time.
    """
    ends, said = clock() + timeout_s, timeout_s < POLL_S
    while True:
        text = _content(path)
        status = _status(text)
        if status not in {"initializing", "cut off"}:
            return text
        if clock() >= ends:
            break
        if not said:
            said = True
            seen = 'its status is "initializing"' if status == "initializing" else "its end is missing"
            say(f"waiting up to {timeout_s:g} s for the rank table {path} to be completed: {seen}")
        sleep(POLL_S)
    if status == "initializing" and timeout_s:
        what = f'the rank table was not completed within {timeout_s:g} s: its status is still "initializing"'
        raise UserError(what, str(path), ("see why whoever writes it does not end; or finish it by hand",))
    return text


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""  # some writers replace the file


def _status(text: str) -> str:
    try:
        value = parse(text, "").value
    except UserError:
        return "broken" if text.rstrip().endswith("}") else "cut off"
    return str(value.get("status", "")) if isinstance(value, dict) else ""


def write(cluster: Cluster, hccn: Mapping[int, str] | None = None) -> tuple[str, list[str]]:
    """Returns a table of version 1.0, and what of the cluster it has no place for.

    Cards' addresses are known for this machine alone, so they are left out unless it is the only one; a reader finds
    them in each machine's /etc/hccn.conf, as `hccn`, by the card's number, here.

    Raises:
        UserError: A number of processes is unknown, or HCCL could not use the table.
    """
    _refuse_unknown_sizes(cluster)
    notes: list[str] = []
    if any("@" in machine.host for machine in cluster.machines):
        notes.append("names of users are left out: a rank table has no place for them")
    if any(machine.port for machine in cluster.machines):
        notes.append("the ports of ssh are left out: only a hostfile has a place for them")
    if cluster.master_address or cluster.master_port:
        notes.append("the master's address and port are left out: HCCL takes the first server")
    own = read_hccn() if hccn is None else hccn
    addresses = own if len(cluster.machines) == 1 else {}
    if not addresses:
        notes.append("device_ip is left out: add each card's from address_N in its own machine's /etc/hccn.conf")
    servers, rank = [], 0
    for name, machine in zip(_server_ids(cluster.machines), cluster.machines, strict=True):
        devices = []
        for card in machine.devices or range(machine.slots):
            known = {"device_ip": addresses[card]} if card in addresses else {}
            devices.append(Device(device_id=str(card), **known, rank_id=str(rank)))
            rank += 1
        more = {} if name == machine.address else {"host_ip": machine.address}
        servers.append(Server(server_id=name, **more, device=devices, host_nic_ip="reserve"))
    count = str(len(servers))
    text = written(RankTable(version="1.0", server_count=count, server_list=servers, status="completed"))
    read(text, "the rank table to be written")
    return text, notes


def place(environment: Mapping[str, str], timeout_s: float = 0.0) -> LauncherPlace | None:
    """The process that RANK_TABLE_FILE and RANK_ID say this is; None without one of them.

    Waits up to `timeout_s` for a table that is still being written. Raises UserError: there is no such table, it is
    wrong, or the other variables contradict it.
    """
    name = environment.get("RANK_TABLE_FILE", "")
    if not name or not environment.get("RANK_ID"):
        return None
    path = Path(name)
    if not path.is_file():
        raise UserError(f"there is no file {name}", "RANK_TABLE_FILE", ("export the rank table's own path",))
    return place_in(read_table(wait(path, timeout_s), name), environment, name)


def place_in(table: RankTable, environment: Mapping[str, str], where: str) -> LauncherPlace:
    """The process that RANK_ID says this is, in a table. Raises UserError: a variable contradicts it."""
    servers = table.by_rank
    size = sum(len(server.device) for server in servers)
    rank = _number(environment, "RANK_ID")
    if rank >= size:
        _contradict("RANK_ID", rank, f"0 … {size - 1}, the ranks in the table", where)
    server = next(server for server in servers if str(rank) in {device.rank_id for device in server.device})
    local_rank = [device.rank_id for device in server.by_rank].index(str(rank))
    card = int(server.by_rank[local_rank].device_id)
    if environment.get("RANK_SIZE") and _number(environment, "RANK_SIZE") != size:
        _contradict("RANK_SIZE", environment["RANK_SIZE"], f"{size}, the number of cards in the table", where)
    if environment.get("DEVICE_ID") and _number(environment, "DEVICE_ID") != card:
        _contradict("DEVICE_ID", environment["DEVICE_ID"], f"{card}, the card of rank {rank} in the table", where)
    address, address_from = _master(environment, servers)
    port, port_from = DEFAULT_PORT, "default"
    if environment.get("MASTER_PORT"):
        port, port_from = _number(environment, "MASTER_PORT"), "MASTER_PORT"
    origins = dict.fromkeys(("size", "local_rank", "local_size", "device"), f"rank table {where}")
    return LauncherPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=len(server.device),
        master_address=address,
        master_port=port,
        device=card,
        started_by="rank table",
        origins={**origins, "rank": "RANK_ID", "master_address": address_from, "master_port": port_from},
    )


def _master(environment: Mapping[str, str], servers: Sequence[Server]) -> tuple[str, str]:
    """Where rank 0's store listens, and why there."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], "MASTER_ADDR"
    if len(servers) == 1:
        return "127.0.0.1", "the rank table has one server"
    return servers[0].host, f"server_id {servers[0].server_id} of rank 0"


def _number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", environment[name]):
        what = f'{name} is "{environment[name]}"; expected a number from 0 on'
        raise UserError(what, "environment", (f"export {name}=0, 1, 2 …",))
    return int(environment[name])


def _contradict(name: str, found: object, expected: str, where: str) -> NoReturn:
    what = f"{name} is {found}; expected {expected}"
    mend = (f"correct {name}, or export the RANK_TABLE_FILE that belongs to it",)
    raise UserError(what, f"environment, and {where}", mend)


def _machine(server: Server) -> Machine:
    cards = tuple(int(device.device_id) for device in server.by_rank)
    return Machine(server.host, len(cards), () if cards == tuple(range(len(cards))) else cards)


def _refuse_unknown_sizes(cluster: Cluster) -> None:
    for machine in cluster.machines:
        if not machine.slots:
            what = f"a rank table lists devices, but how many {machine.host or 'a machine'} has is not known"
            raise UserError(what, cluster.source, (f"write the number as slots: {machine.host or 'n1'} slots=8",))
        if machine.devices and len(machine.devices) != machine.slots:
            what = f"{machine.host} has {machine.slots} processes, but {len(machine.devices)} devices"
            raise UserError(what, cluster.source, ("a rank table has one process for each device",))


def _server_ids(machines: Sequence[Machine]) -> list[str]:
    """Names whose order as text is the order of ranks: the machines' own, or node_0, node_1 … beside addresses."""
    hosts = [machine.address for machine in machines]
    if hosts == sorted(hosts):
        return hosts
    if not all(map(is_address, hosts)):
        what = f"HCCL wants machines in the order of their names as text: {', '.join(sorted(hosts))}"
        raise UserError(what, "", ("list them in that order, or by their addresses", "as text, n10 comes before n9"))
    width = len(str(len(hosts) - 1))
    return [f"node_{index:0{width}}" for index in range(len(hosts))]


def find_server(table: RankTable, names: Collection[str], where: str) -> int:
    """Which server of a checked table, by rank, has these addresses or name. Raises UserError: none, or several."""
    servers = table.by_rank
    if len(servers) == 1:
        return 0
    own = {name for name in names if not (is_address(name) and name.startswith(("127.", "::1")))}
    found = [index for index, server in enumerate(servers) if server.names & own]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"server {index}: {', '.join(sorted(server.names))}" for index, server in enumerate(servers[:8]))
    what = "matches several servers of" if found else "is none of the servers in"
    raise UserError(
        f"this machine {what} the rank table",
        where,
        (
            f"this machine: {', '.join(sorted(own)) or 'no address but loopback'}",
            f"the table: {listed}",
            "add this machine's address as host_ip of its server, or start each process with RANK_ID",
        ),
    )


def read_hccn(path: Path = HCCN) -> dict[int, str]:
    """Cards' addresses from lines such as address_0=192.168.100.101, if the file is there. Raises UserError."""
    if not path.exists():
        return {}
    found: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        matched = re.fullmatch(r"\s*address_(\d+)\s*=\s*(\S*)\s*", line)
        if matched and not is_address(matched[2]):
            what = f'address_{matched[1]} is "{matched[2]}"; expected an IP address'
            raise UserError(what, at_line(str(path), number), ("set it with hccn_tool, or correct the file",))
        if matched:
            found[int(matched[1])] = matched[2]
    return found
