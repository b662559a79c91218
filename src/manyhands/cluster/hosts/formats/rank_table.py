"""Reads and writes Ascend rank tables, versions 1.0 (Ascend 910, A2) and 1.2 (super pods).

The NPUs of a server become the devices of a machine, in rank order. If ranks 0, 1, 2 … use NPUs 0, 1, 2 …, the devices
stay empty, as in other formats. Unknown fields are ignored, as in HCCL, unless they look like misspelled known fields.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from manyhands.cluster.hosts import inventory
from manyhands.core.errors import UserError
from manyhands.core.files import UnreadableError, parse_count, parse_json
from manyhands.core.terminal import say

POLL_S = 1.0
HCCN = Path("/etc/hccn.conf")
Keys = tuple[str | int, ...]  # the path of a value in the file
Mistake = tuple[Keys, str, *tuple[str, ...]]  # the path of a wrong value, the error message, and hints

_PLACEHOLDER = re.compile(r"[*<>?…\s]|\.\.\.|^$|(?i:(^|[._-])x{2,}([._-]|$)|^[\dx.]*x[\dx.]*$)")
_NEW_TABLE = "create a new table from a list of hosts: manyhands explain --cluster HOSTFILE --write table.json"
_OTHER_LAYOUTS = {  # keys that only tables of other layouts have, with the layout and the hint
    "group_list": ('the layout of MindSpore before 1.0 ("group_list"); versions 1.0 and 1.2 are supported', _NEW_TABLE),
    "rank_list": ('the layout of version 2.0 ("rank_list"); versions 1.0 and 1.2 are supported', _NEW_TABLE),
    "server_group_list": ("ModelArts' layout, with each server_list inside server_group_list",
                          'replace "server_group_list" with the "server_list" of one group, next to "status"'),
}  # fmt: skip
_INITIALIZING = 'its status is "initializing"'
_UNKNOWN = {"", "reserve"}  # written by tools for an unknown address
_UNIQUE = {  # fields that must be unique, with the hint for a repeated value
    "server_id": "list all cards of one machine under one server",
    "device_id": "list each card once; `ls /dev/davinci*` shows the numbers of the cards",
    "device_ip": "take each card's own address from /etc/hccn.conf on the server",
}
_NO_PLACEHOLDER = "a value from your cluster, not a placeholder"


def _validator(is_valid: Callable[[str], object], expected: str) -> AfterValidator:
    def check(word: str) -> str:
        if not is_valid(word):
            raise ValueError(f"expected {expected}")
        return word

    return AfterValidator(check)


Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Port = Annotated[str, _validator(lambda word: 0 < (parse_count(word) or 0) < 65536, 'a port from "1" to "65535"')]
Address = Annotated[
    str,
    _validator(lambda word: word in _UNKNOWN or not _PLACEHOLDER.search(word), _NO_PLACEHOLDER),
    _validator(lambda word: word in _UNKNOWN or inventory.is_address(word), "an IP address"),
]
Identity = Annotated[
    str,
    _validator(lambda word: not _PLACEHOLDER.search(word), _NO_PLACEHOLDER),
    _validator(lambda word: len(word) <= 64 and word.isprintable(), "at most 64 printable characters"),
]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelled(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            near = [] if key in cls.model_fields else get_close_matches(key, cls.model_fields, n=1, cutoff=0.85)
            if near:
                found = {"key": key, "near": near[0]}
                raise PydanticCustomError("misspelled", 'a rank table has no field "{key}"', found)
        return value


class Device(_Entry):
    """An NPU; its process has the rank `rank_id`."""

    device_id: Number
    device_ip: Address = ""
    rank_id: Number
    device_port: Port | None = None
    super_device_id: Number | None = None
    backup_device_ip: Address | None = None
    backup_device_port: Port | None = None
    host_port: Port | None = None


class Server(_Entry):
    """One machine and its NPUs."""

    server_id: Identity
    device: list[Device] = Field(min_length=1)
    host_nic_ip: str | None = None
    host_ip: Address | None = None
    container_ip: Address | None = None
    pod_ip: Address | None = None
    server_ip: Address | None = None

    @property
    def cards(self) -> tuple[int, ...]:
        """The indices of the NPUs, in rank order."""
        return tuple(int(card.device_id) for card in sorted(self.device, key=lambda card: int(card.rank_id)))

    @property
    def host(self) -> str:
        """The first IP address of the server in the table, or its `server_id` if there is none."""
        given = (self.container_ip, self.pod_ip, self.server_id, self.server_ip, self.host_ip)
        return next((name for name in given if name and inventory.is_address(name)), self.server_id)


class _PodServer(_Entry):
    server_id: Identity


class _SuperPod(_Entry):
    super_pod_id: Identity
    server_list: list[_PodServer]


class RankTable(_Entry):
    """A completed rank table of any supported version."""

    version: Literal["1.0", "1.2"] | None = None
    server_count: Number | None = None
    server_list: list[Server] = Field(min_length=1)
    status: Literal["completed"]
    super_pod_list: list[_SuperPod] | None = None

    @property
    def by_rank(self) -> list[Server]:
        return sorted(self.server_list, key=lambda server: min(int(card.rank_id) for card in server.device))

    @property
    def cards(self) -> dict[Keys, Device]:
        """The NPUs, keyed by their paths in the JSON file, such as ("server_list", 0, "device", 1)."""
        servers = enumerate(self.server_list)
        return {("server_list", at, "device", n): card for at, each in servers for n, card in enumerate(each.device)}


def recognize(path: str, text: str) -> bool:
    """Returns True for a JSON object with a list of servers, or for an object in a file named like a rank table."""
    named = re.search(r"(rank_?table|^hccl).*\.json$", Path(path).name)
    return text.lstrip().startswith("{") and bool(named or re.search(r'"(server|rank|group)_list"\s*:', text))


def read(text: str, where: str) -> inventory.Cluster:
    machines: list[inventory.Machine] = []
    for server in read_table(text, where).by_rank:
        ids, count = server.cards, len(server.device)
        machines.append(inventory.Machine(server.host, count, () if ids == tuple(range(count)) else ids))
    return inventory.Cluster(tuple(machines), source=f"rank table {where}".rstrip())


def read_table(text: str, where: str) -> RankTable:
    """Reads a table. Raises UserError, with the field's path, if a field is wrong or breaks a rule of HCCL."""
    try:
        value = parse_json(text.removeprefix("\ufeff"), once_each=True)
    except UnreadableError as error:
        hints = ("correct the file; JSON allows no comments, no trailing commas and no key twice in an object",)
        message = f"the rank table is not valid JSON: {error.problem}"
        raise UserError(message, inventory.at_line(where, error.line), hints) from None
    mistakes = [*islice(_layout_mistakes(value), 1)]
    if not mistakes:
        try:
            table = RankTable.model_validate(value)
            mistakes = [*islice(chain(_list_mistakes(table), _rank_mistakes(table)), 1)]
            if not mistakes:
                return table
        except ValidationError as error:
            mistakes = [_value_mistake(dict(each)) for each in error.errors()]
    # An unsupported version explains all other mistakes.
    path, message, *hints = min(mistakes, key=lambda mistake: mistake[0] != ("version",))
    raise UserError(message, ": ".join(filter(None, (where, _dotted(path)))), tuple(hints))


def _dotted(path: Keys) -> str:
    """Formats a path, such as "server_list[1].device[0].rank_id"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _layout_mistakes(value: Any) -> Iterator[Mistake]:
    if not isinstance(value, dict):
        yield (), "the rank table is not a JSON object, { … }", "see docs/guides/cluster-files.md for the format"
        return
    for key, (layout, hint) in _OTHER_LAYOUTS.items():
        if key in value and "server_list" not in value:
            yield (key,), f"the rank table has {layout}", hint
    if value.get("status") == "initializing":
        hint = 'wait until the program that writes the table sets status to "completed"'
        yield ("status",), f"the rank table is incomplete: {_INITIALIZING}", hint


def _value_mistake(error: dict[str, Any]) -> Mistake:
    path: Keys = error["loc"]
    name, field = _dotted(path) or "the rank table", str(path[-1]) if path else ""
    if error["type"] == "missing":
        return path, f"{name} is missing", f'add "{field}" at this place'
    if error["type"] == "misspelled":
        return (*path, error["ctx"]["key"]), error["msg"], f'did you mean "{error["ctx"]["near"]}"?'
    choices = str(error.get("ctx", {}).get("expected", "")).replace("'", '"')
    kinds = {
        "string_type": "expected a string in double quotes",
        "list_type": "expected a list, [ … ]",
        "model_type": "expected an object, { … }",
        "string_pattern_mismatch": 'expected a number in quotes, "0" or higher',
        "too_short": "expected at least one entry",
        "literal_error": f"expected {choices}",
    }
    kind = kinds.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    found = json.dumps(error["input"], ensure_ascii=False)
    hint = f"write {choices}" if choices else "correct this value"
    if isinstance(error["input"], int) and not choices:
        hint = f'write "{found}"'
    elif field in {"device_ip", "backup_device_ip"}:
        hint = "take the address from /etc/hccn.conf on the server: address_0 belongs to device 0"
    elif "placeholder" in kind and field in {"server_id", "host_ip", "container_ip", "pod_ip", "server_ip"}:
        hint = "write the server's IP address; `hostname -I` on the server shows its addresses"
    return path, f"{name} is {found if len(found) < 80 else found[:77] + '…'}; {kind}", hint


def _list_mistakes(table: RankTable) -> Iterator[Mistake]:
    """Yields a wrong count of servers, unlisted servers of super pods, and repeated values that must be unique."""
    ids = [server.server_id for server in table.server_list]
    if table.server_count is not None and int(table.server_count) != len(ids):
        counts = f'"{table.server_count}", but server_list has {len(ids)} servers; expected "{len(ids)}"'
        yield ("server_count",), f"server_count is {counts}", "correct the count, or add the missing servers"
    for at, pod in enumerate(table.super_pod_list or []):
        for index, server in enumerate(pod.server_list):
            if server.server_id not in ids:
                message = f'server_id "{server.server_id}" of a super pod is not in server_list'
                yield ("super_pod_list", at, "server_list", index, "server_id"), message, "correct this server_id"
    entries: list[tuple[Keys, str, str, object]]  # path, field, value, and what must be unique
    entries = [(("server_list", at), "server_id", name, name) for at, name in enumerate(ids)]
    for path, card in table.cards.items():
        entries.append((path, "device_id", card.device_id, (path[1], card.device_id)))
        if card.device_ip not in _UNKNOWN:
            entries.append((path, "device_ip", card.device_ip, (card.device_ip, card.device_port)))
    seen = dict[object, Keys]()
    for path, field, value, unique in entries:
        first = seen.setdefault((field, unique), path)
        if first != path:
            yield (*path, field), f'{field} "{value}" repeats the {field} of {_dotted(first)}', _UNIQUE[field]


def _rank_mistakes(table: RankTable) -> Iterator[Mistake]:
    """Yields ranks that repeat, are out of range, or don't follow the text order of server_id."""
    ranks = {(*path, "rank_id"): int(card.rank_id) for path, card in table.cards.items()}
    missing = sorted({*range(len(ranks))} - {*ranks.values()})
    hint, expected = f"missing: {', '.join(map(str, missing[:8]))}", f"expected 0 … {len(ranks) - 1}, each once"
    seen = set[int]()
    for path, rank in ranks.items():
        if rank in seen:
            yield path, f'rank_id "{rank}" is given twice; {expected}', hint
        if rank >= len(ranks):
            yield path, f'rank_id is "{rank}", but the table has {len(ranks)} cards; {expected}', hint
        seen.add(rank)
    lowest, before = 0, "ranks follow the text order of server_id"
    hint = 'number the ranks in the text order of server_id; "10.0.0.10" comes before "10.0.0.9"'
    for at, server in sorted(enumerate(table.server_list), key=lambda entry: entry[1].server_id):
        wanted, name = range(lowest, lowest := lowest + len(server.device)), server.server_id
        for index, card in enumerate(server.device):
            if int(card.rank_id) not in wanted:
                span = f'expected {wanted[0]} … {wanted[-1]} on server "{name}", because {before}'
                yield ("server_list", at, "device", index, "rank_id"), f'rank_id is "{card.rank_id}"; {span}', hint
        before = f'ranks follow the text order of server_id and "{name}" comes first'


def wait(path: Path, timeout_s: float) -> str:
    """Waits while a table is missing, truncated or initializing. Returns the text. Raises UserError on timeout."""
    ends, announced = time.monotonic() + timeout_s, timeout_s < POLL_S
    while True:
        text = ""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            value = json.loads(text.removeprefix("\ufeff"))
            state = _INITIALIZING if isinstance(value, dict) and value.get("status") == "initializing" else ""
        except (FileNotFoundError, ValueError, RecursionError):  # some writers replace the file
            state = "" if text.rstrip().endswith("}") else "the end of the file is missing"
        if not state or time.monotonic() >= ends:
            break
        if not announced:
            announced = True
            say(f"waiting up to {timeout_s:g} s for the rank table {path} to be completed: {state}")
        time.sleep(POLL_S)
    if state == _INITIALIZING:
        message = f'the rank table was not completed within {timeout_s:g} s: its status is still "initializing"'
        raise UserError(message, str(path), ("check the program that writes the table, or complete the table by hand",))
    return text


def write(cluster: inventory.Cluster) -> tuple[str, list[str]]:
    """Returns (text of a table of version 1.0, notes on values that the table can't hold).

    Adds the NPUs' addresses if there is only one machine. Raises UserError if a number of processes is unknown, or if
    the table breaks a rule of HCCL.
    """
    addresses = read_hccn() if len(cluster.machines) == 1 else {}
    notes = {
        "user names are omitted: rank tables don't have user names": any("@" in m.host for m in cluster.machines),
        "ssh ports are omitted: only hostfiles have ssh ports": any(m.port for m in cluster.machines),
        "the master's port is omitted: rank tables don't have a port": cluster.master_port,
        "device_ip is omitted: for card N, add address_N from /etc/hccn.conf on the card's machine": not addresses,
    }
    hosts = [machine.address for machine in cluster.machines]
    in_order = hosts == sorted(hosts)  # else IP addresses have the IDs node_0, node_1 …
    if not (in_order or all(map(inventory.is_address, hosts))):
        message = f"HCCL requires machines in the text order of their names: {', '.join(sorted(hosts))}"
        hints = ("list the machines in this order (n10 comes before n9)", "or list IP addresses instead of names")
        raise UserError(message, cluster.source, hints)
    servers, rank = list[dict[str, Any]](), 0
    for index, machine in enumerate(cluster.machines):
        if not machine.slots:
            message = f"a rank table lists devices, but the number of devices of {machine.host} is unknown"
            raise UserError(message, cluster.source, (f"add the number of devices: {machine.host} slots=8",))
        cards = machine.devices or range(machine.slots)
        if len(cards) != machine.slots:
            message = f"{machine.host} has {machine.slots} processes, but {len(cards)} devices"
            raise UserError(message, cluster.source, ("set one process for each device",))
        devices = list[dict[str, str]]()
        for card in cards:
            ip = {"device_ip": addresses[card]} if card in addresses else {}
            devices.append({"device_id": str(card), **ip, "rank_id": str(rank)})
            rank += 1
        node = {"server_id": f"node_{index:0{len(str(len(hosts) - 1))}}", "host_ip": machine.address}
        names = {"server_id": machine.address} if in_order else node
        servers.append({**names, "device": devices, "host_nic_ip": "reserve"})
    table = {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": "completed"}
    text = json.dumps(table, indent=2, ensure_ascii=False)
    text = re.sub(r"\{[^{}\[\]]*\}", lambda found: " ".join(found[0].split()), text) + "\n"  # one NPU per line
    read(text, "the new rank table")
    return text, [note for note, applies in notes.items() if applies]


def read_hccn() -> dict[int, str]:
    """Returns {NPU: address} from the lines address_0=192.168.100.101 of HCCN. Raises UserError for a wrong address."""
    found: dict[int, str] = {}
    text = HCCN.read_text(encoding="utf-8", errors="replace") if HCCN.exists() else ""
    for at, line in enumerate(text.splitlines(), 1):
        if matched := re.fullmatch(r"\s*address_(\d+)\s*=\s*(\S*)\s*", line):
            if not inventory.is_address(matched[2]):
                message = f'address_{matched[1]} is "{matched[2]}"; expected an IP address'
                hints = ("set the address with hccn_tool, or correct the file",)
                raise UserError(message, inventory.at_line(str(HCCN), at), hints)
            found[int(matched[1])] = matched[2]
    return found


def place(environment: Mapping[str, str]) -> inventory.LauncherPlace | None:
    """Returns the rank RANK_ID of RANK_TABLE_FILE; None if a variable is unset. Raises UserError for contradictions."""
    where = environment.get("RANK_TABLE_FILE", "")
    if not where or not environment.get("RANK_ID"):
        return None
    path = Path(where)
    if not path.is_file():
        raise UserError(f"there is no file {where}", "RANK_TABLE_FILE", ("export the path of the rank table",))
    servers = read_table(path.read_text(encoding="utf-8", errors="replace"), where).by_rank
    cards = [(server, local_rank, card) for server in servers for local_rank, card in enumerate(server.cards)]
    size, rank = len(cards), inventory.number(environment, "RANK_ID")
    server, local_rank, card = cards[min(rank, size - 1)]
    expected = {
        "RANK_ID": (range(size), f"0 … {size - 1}, the ranks in the table"),
        "RANK_SIZE": ([size], f"{size}, the number of cards in the table"),
        "DEVICE_ID": ([card], f"{card}, the card of rank {rank} in the table"),
    }
    for name, (fitting, words) in expected.items():
        if (found := inventory.number(environment, name, fitting[0])) not in fitting:
            hints = (f"correct {name}, or export the RANK_TABLE_FILE of this job",)
            raise UserError(f"{name} is {found}; expected {words}", f"environment, and {where}", hints)
    table, first = f"rank table {where}", (servers[0].host, f"server_id {servers[0].server_id} of rank 0")
    return inventory.LauncherPlace.from_values(
        "rank table", rank=(rank, "RANK_ID"), size=(size, table), local_rank=(local_rank, table),
        local_size=(len(server.device), table), device_index=(card, table),
        master_address=inventory.master_address(environment, alone=len(servers) == 1) or first,
        master_port=inventory.master_port(environment),
    )  # fmt: skip
