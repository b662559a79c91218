"""What processes write for each other into their store. Whoever reaches the store may write there, so it is checked.

What doesn't fit counts as not said. What is shown of it is cleaned of what a terminal would obey, and named as another
process's words; advice of others is never passed on.
"""

import contextlib
import ipaddress
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manyhands.core.files import parse_json
from manyhands.core.terminal import plain
from manyhands.parallel.heartbeat import Heartbeat

# Far above what any process says of itself.
_MOST_BYTES = 1 << 18
_LONGEST_WHAT = 2000


def _shown(text: str) -> str:
    return plain(text).strip()


def _address(text: str) -> str:
    ipaddress.ip_address(text)
    return text


_Name = Annotated[str, Field(max_length=256), AfterValidator(_shown)]
_Pid = Annotated[int, Field(gt=0, lt=2**31)]
_Rank = Annotated[int, Field(ge=0, lt=2**31)]


class _Said(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Present(_Said):
    """A process that has come to meet the others: under present/<attempt>/<rank>."""

    host: _Name
    machine: Annotated[str, Field(max_length=2000)]
    pid: _Pid
    addresses: Annotated[list[Annotated[str, AfterValidator(_address)]], Field(max_length=256)] = []
    size: Annotated[int, Field(ge=1, lt=2**31)]
    digest: Annotated[str, Field(max_length=_MOST_BYTES // 2), AfterValidator(_shown)] = ""
    torch: _Name = ""
    python: _Name = ""


class DuplicateRank(_Said):
    """A rank that two processes were started with, as the second one says it: under present/<attempt>/twice."""

    rank: _Rank
    host: _Name
    pid: _Pid


class InvalidRank(_Said):
    """A process whose rank is none of the job's, as it says before it ends: under present/<attempt>/outsider."""

    host: _Name
    pid: _Pid
    digest: Annotated[str, Field(max_length=_MOST_BYTES // 2)]
    what: Annotated[str, Field(max_length=_LONGEST_WHAT), AfterValidator(_shown)]


class PeerFailure(_Said):
    """Why the first process failed: under failure/<attempt>/text."""

    rank: _Rank
    host: _Name
    what: Annotated[str, Field(max_length=_LONGEST_WHAT), AfterValidator(_shown)]

    @classmethod
    def of(cls, rank: int, host: str, what: str) -> "PeerFailure":
        """With words that are too long cut off."""
        return cls(rank=rank, host=host[:256], what=what[:_LONGEST_WHAT])


class Answer(_Said):
    """How far a process is, and was some seconds before, as it answers a call: under roll/<attempt>/<call>/<rank>."""

    before: Heartbeat
    now: Heartbeat


S = TypeVar("S", bound=_Said)


def understood(content: bytes | str, kind: type[S]) -> S | None:
    """What was said, or None where it can't be that."""
    if len(content) > _MOST_BYTES:
        return None
    with contextlib.suppress(ValueError):  # of JSON, of UTF-8, and the validation's own
        return kind.model_validate(parse_json(content))
    return None
