"""How the values of a rank table must fit together, as HCCL demands it."""

from collections.abc import Callable, Iterator
from typing import NoReturn

from manyhands.cluster.descriptions.hccl_table import RankTable, Server
from manyhands.cluster.descriptions.located_json import Document, Path
from manyhands.core.errors import UserError

GROUP_SIZES = (1, 2, 4, 8)
# Fields that only machines newer than Ascend 910 have; these join their cards in another way.
NEWER = ("device_port", "super_device_id", "backup_device_ip")


def check(table: RankTable, document: Document) -> None:
    """Checks a completed table. Raises UserError: values contradict each other, or HCCL can't group such cards."""
    for rule in (_count, _names, _cards, _ranks, _order, _addresses, _pods, _groups):
        rule(table, _refuser(document))


Refuse = Callable[..., NoReturn]


def _refuser(document: Document) -> Refuse:
    def refuse(path: Path, what: str, *mend: str) -> NoReturn:
        raise UserError(what, document.at(path), mend)

    return refuse


def _count(table: RankTable, refuse: Refuse) -> None:
    listed = len(table.server_list)
    if table.server_count is not None and int(table.server_count) != listed:
        what = f'server_count is "{table.server_count}", but server_list has {listed}; expected "{listed}"'
        refuse(("server_count",), what, "correct the count, or add the missing servers")


def _names(table: RankTable, refuse: Refuse) -> None:
    seen: dict[str, int] = {}
    for index, server in enumerate(table.server_list):
        first = seen.setdefault(server.server_id, index)
        if first != index:
            what = f'server_id "{server.server_id}" is also that of server_list[{first}]; each server has its own'
            refuse(("server_list", index, "server_id"), what, "list all cards of one machine under one server")


def _cards(table: RankTable, refuse: Refuse) -> None:
    for at, server in enumerate(table.server_list):
        seen: dict[str, int] = {}
        for index, device in enumerate(server.device):
            first = seen.setdefault(device.device_id, index)
            if first != index:
                what = f'device_id "{device.device_id}" is also that of device[{first}] of this server'
                mend = "give each card once; `ls /dev/davinci*` shows their numbers"
                refuse(("server_list", at, "device", index, "device_id"), what, mend)


def _each(table: RankTable) -> Iterator[tuple[Path, Server, str]]:
    for at, server in enumerate(table.server_list):
        for index, device in enumerate(server.device):
            yield ("server_list", at, "device", index, "rank_id"), server, device.rank_id


def _ranks(table: RankTable, refuse: Refuse) -> None:
    size = sum(1 for _ in _each(table))
    ranks = {int(rank) for _, _, rank in _each(table)}
    missing = ", ".join(map(str, sorted(set(range(size)) - ranks)[:8]))
    seen: set[str] = set()
    for path, _, rank in _each(table):
        if rank in seen:
            what = f'rank_id "{rank}" is given twice; expected 0 … {size - 1}, each once'
            refuse(path, what, f"missing: {missing}")
        if int(rank) >= size:
            what = f'rank_id is "{rank}", but the table has {size} cards; expected 0 … {size - 1}, each once'
            refuse(path, what, f"missing: {missing}")
        seen.add(rank)


def _order(table: RankTable, refuse: Refuse) -> None:
    """Ranks follow the servers' names in the order of text; so no server's ranks lie between another's."""
    lowest = 0
    before = ""
    for server in sorted(table.server_list, key=lambda server: server.server_id):
        wanted = range(lowest, lowest + len(server.device))
        for path, owner, rank in _each(table):
            if owner is server and int(rank) not in wanted:
                what = (
                    f'rank_id is "{rank}"; expected {wanted[0]} … {wanted[-1]} on server "{server.server_id}": ranks '
                    f"follow the order of server_id as text" + (f', and "{before}" comes before it' if before else "")
                )
                refuse(path, what, 'number the ranks in that order; as text, "10.0.0.10" comes before "10.0.0.9"')
        lowest, before = wanted[-1] + 1, server.server_id


def _addresses(table: RankTable, refuse: Refuse) -> None:
    seen: dict[tuple[str, str | None], Path] = {}
    for at, server in enumerate(table.server_list):
        for index, device in enumerate(server.device):
            path: Path = ("server_list", at, "device", index, "device_ip")
            first = seen.setdefault((device.device_ip, device.device_port), path)
            if first != path and device.device_ip not in {"", "reserve"}:
                what = f'device_ip "{device.device_ip}" is also that of server_list[{first[1]}].device[{first[3]}]'
                refuse(path, what, "each card has its own address; it is in that machine's /etc/hccn.conf")


def _pods(table: RankTable, refuse: Refuse) -> None:
    known = {server.server_id for server in table.server_list}
    for at, pod in enumerate(table.super_pod_list or []):
        for index, server in enumerate(pod.server_list):
            if server.server_id not in known:
                what = f'server_id "{server.server_id}" of a super pod is not in server_list'
                refuse(("super_pod_list", at, "server_list", index, "server_id"), what, "correct the name")


def _groups(table: RankTable, refuse: Refuse) -> None:
    """Ascend 910: 1, 2, 4 or 8 cards on a machine, 2 and 4 within 0-3 or 4-7; over several machines a multiple of 8."""
    if table.version == "1.2" or _is_newer(table):
        return
    other = 'machines newer than Ascend 910 say so in the table, such as "hardware_type": "800T-A2" beside server_id'
    for at, server in enumerate(table.server_list):
        path: Path = ("server_list", at, "device")
        count, cards = len(server.device), sorted(int(device.device_id) for device in server.device)
        if count not in GROUP_SIZES:
            what = f"{count} cards on one server; HCCL can group 1, 2, 4 or 8"
            refuse(path, what, "list that many cards", other)
        if cards[-1] > 7:
            refuse(path, f"cards {_listed(cards)}; expected numbers from 0 to 7", "correct the device_id", other)
        if count in (2, 4) and cards[0] < 4 <= cards[-1]:
            what = f"cards {_listed(cards)} are on both rings; HCCL can group {count} cards within 0-3 or within 4-7"
            refuse(path, what, f"choose {count} cards of one ring", other)
    total = sum(len(server.device) for server in table.server_list)
    if len(table.server_list) > 1 and total % 8:
        what = f"{total} cards over {len(table.server_list)} servers; HCCL can group 8, 16, 24 … over several"
        refuse(("server_list",), what, "list that many cards, or one server alone", other)


def _is_newer(table: RankTable) -> bool:
    fields = {name for server in table.server_list for device in server.device for name in device.model_fields_set}
    return bool(fields & set(NEWER)) or any(server.hardware_type for server in table.server_list)


def _listed(cards: list[int]) -> str:
    return ", ".join(map(str, cards))
