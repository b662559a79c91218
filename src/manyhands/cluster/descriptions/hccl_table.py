"""Ascend's rank table as a typed whole: every field that HCCL and its tools write, read strictly.

Version 1.0 is for Ascend 910 and A2, version 1.2 for super pods (A3). HCCL passes over fields that it doesn't know,
and so does this; but one that looks like a slip of the pen is refused.
"""

import difflib
import ipaddress
import json
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from manyhands.cluster.descriptions.inventory import is_address
from manyhands.cluster.descriptions.located_json import Document, Path, dotted
from manyhands.core.errors import UserError

Version = Literal["1.0", "1.2"]

_PLACEHOLDER = re.compile(r"[*<>…\s]|\.\.\.|^$|(?i:(^|[._-])x{2,}([._-]|$)|^[\dx.]*x[\dx.]*$)")
_VERSIONS = " or ".join(f'"{word}"' for word in get_args(Version))
_OTHER_LAYOUTS = {"group_list": 'of MindSpore before 1.0 ("group_list")', "rank_list": 'of version 2.0 ("rank_list")'}
_ALIKE = 0.85


def _filled_in(word: str) -> str:
    if _PLACEHOLDER.search(word):
        raise ValueError("expected this cluster's own value: this is a placeholder, as documents print it")
    return word


def _number(word: str) -> str:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", word):
        raise ValueError('expected a number from "0" on, in quotes')
    return word


def _port(word: str) -> str:
    if not 1 <= int(_number(word)) <= 65535:
        raise ValueError('expected a port from "1" to "65535"')
    return word


def _address(word: str) -> str:
    try:
        ipaddress.ip_address(_filled_in(word))
    except ValueError as error:
        raise ValueError(str(error) if "expected" in str(error) else "expected an IP address") from error
    return word


def _address_or_none(word: str) -> str:
    """Tools write "reserve" or nothing where they have no address."""
    return word if word in {"", "reserve"} else _address(word)


def _identity(word: str) -> str:
    if len(_filled_in(word)) > 64:
        raise ValueError("expected at most 64 characters")
    return word


Number = Annotated[str, AfterValidator(_number)]
Port = Annotated[str, AfterValidator(_port)]
Address = Annotated[str, AfterValidator(_address_or_none)]
Identity = Annotated[str, AfterValidator(_identity)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Device(_Part):
    """One card; its process has the rank `rank_id`."""

    device_id: Number
    device_ip: Address = ""
    rank_id: Number
    device_port: Port | None = None
    super_device_id: Number | None = None
    backup_device_ip: Address | None = None
    backup_device_port: Port | None = None
    host_port: Port | None = None


class Server(_Part):
    """One machine and its cards."""

    server_id: Identity
    device: list[Device] = Field(min_length=1)
    host_nic_ip: str | None = None
    host_ip: Address | None = None
    container_ip: Address | None = None
    pod_ip: Address | None = None
    server_ip: Address | None = None
    hardware_type: str | None = None

    @property
    def by_rank(self) -> list[Device]:
        return sorted(self.device, key=lambda device: int(device.rank_id))

    @property
    def names(self) -> set[str]:
        """Everything that this machine is called in the table."""
        given = (self.server_id, self.host_ip, self.container_ip, self.pod_ip, self.server_ip)
        return {name for name in given if name and name != "reserve"}

    @property
    def host(self) -> str:
        """What its processes are reached by: an address where the table has one, else its name."""
        given = (self.container_ip, self.pod_ip, self.server_id, self.server_ip, self.host_ip)
        return next((name for name in given if name and is_address(name)), self.server_id)


class PodServer(_Part):
    """A machine of a super pod."""

    server_id: Identity


class SuperPod(_Part):
    """Machines that one fast fabric joins."""

    super_pod_id: Identity
    server_list: list[PodServer]


class RankTable(_Part):
    """Servers, their cards, and what each version adds to them."""

    version: Version | None = None
    server_count: Number | None = None
    server_list: list[Server] = Field(min_length=1)
    status: Literal["completed", "initializing"]
    super_pod_list: list[SuperPod] | None = None
    board_id: str | None = None
    chip_info: str | None = None
    deploy_mode: str | None = None
    para_plane_nic_location: str | None = None
    para_plane_nic_name: list[str] | None = None
    para_plane_nic_num: str | None = None

    @property
    def by_rank(self) -> list[Server]:
        return sorted(self.server_list, key=lambda server: int(server.by_rank[0].rank_id))


def typed(document: Document) -> RankTable:
    """The table, each value of the right kind. Raises UserError: one is wrong or missing; the file's first is named."""
    _check_layout(document)
    _check_spelling(document, document.value, (), RankTable)
    try:
        return RankTable.model_validate(document.value)
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: document.lines.get(found["loc"], 10**9))
        raise _refusal(document, dict(first)) from error


def written(table: RankTable) -> str:
    """The table as JSON, one card a line; fields that were not given stay out."""
    content = table.model_dump(exclude_unset=True)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return re.sub(r"\{[^{}\[\]]*\}", lambda found: " ".join(found[0].split()), text) + "\n"


def _check_layout(document: Document) -> None:
    value = document.value
    if not isinstance(value, dict):
        raise UserError('a rank table is one object, "{ … }"', document.at(()), ("see docs/guides/cluster-files.md",))
    for key, name in _OTHER_LAYOUTS.items():
        if key in value and "server_list" not in value:
            what = f"this is the layout {name}; versions 1.0 and 1.2 are read"
            mend = ("write it anew from a list of machines: manyhands explain --cluster HOSTFILE --write table.json",)
            raise UserError(what, document.at((key,)), mend)
    if "server_group_list" in value and "server_list" not in value:
        what = "this is ModelArts' layout: each server_list is one level below, in server_group_list"
        mend = ('put one group\'s "server_list" beside "status", in the place of "server_group_list"',)
        raise UserError(what, document.at(("server_group_list",)), mend)
    if value.get("version") not in (None, *get_args(Version)):
        found = json.dumps(value["version"])
        raise UserError(f"version is {found}; expected {_VERSIONS}", document.at(("version",)), (f"write {_VERSIONS}",))


def _check_spelling(document: Document, value: Any, path: Path, part: type[BaseModel]) -> None:
    """Refuses a field that is nearly one that a rank table has; others pass, as they do with HCCL."""
    if not isinstance(value, dict):
        return
    known = part.model_fields
    for key in value:
        near = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
        if near:
            what = f'a rank table has no field "{key}"'
            raise UserError(what, document.at((*path, key)), (f'did you mean "{near[0]}"?',))
    for key, inner in {"server_list": Server, "device": Device, "super_pod_list": SuperPod}.items():
        children = value.get(key) if key in known and part is not SuperPod else None
        for index, child in enumerate(children if isinstance(children, list) else []):
            _check_spelling(document, child, (*path, key, index), inner)


def _refusal(document: Document, error: dict[str, Any]) -> UserError:
    path: Path = error["loc"]
    name = dotted(path) or "the table"
    if error["type"] == "missing":
        return UserError(f"{name} is missing", document.at(path), (f'add "{path[-1]}" here',))
    kinds: dict[str, str] = {
        "string_type": "expected text in double quotes",
        "list_type": "expected a list, [ … ]",
        "model_type": "expected an object, { … }",
        "too_short": "expected at least one entry",
        "literal_error": f"expected {error.get('ctx', {}).get('expected', '')}".replace("'", '"'),
    }
    kind = kinds.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    found = json.dumps(error["input"], ensure_ascii=False)
    what = f"{name} is {found if len(found) < 80 else found[:77] + '…'}; {kind}"
    mend = f'write "{found}"' if isinstance(error["input"], int) else _mend(str(path[-1]) if path else "", kind)
    return UserError(what, document.at(path), (mend,))


def _mend(field: str, kind: str) -> str:
    if field in {"device_ip", "backup_device_ip"}:
        return "the address is in that machine's /etc/hccn.conf: address_0 is the one of device 0"
    if "placeholder" in kind and field in {"server_id", "host_ip", "container_ip", "pod_ip", "server_ip"}:
        return "put that machine's own address there; `hostname -I` on it says which it has"
    return "mend this value"
