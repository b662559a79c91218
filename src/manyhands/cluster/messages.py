"""What a message between a head and its machines is: a typed value, one line of JSON with its version and its number.

The wings say which messages there are. Nothing is unpickled, and what doesn't fit its type is an error at the edge.
"""

import functools
import json
from collections import deque
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from manyhands.core.outside import parse_json

# Both ends must be of one version. It grows with every change of a message.
VERSION = 5
# What may stand in one line; a machine's whole code may be in a request, a run's records in an answer.
LONGEST_LINE = 64 * 1024 * 1024
MEND = ("install the same manyhands on all machines",)


class Message:
    """What one end tells the other; each kind is a frozen dataclass, known by its name."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Message.kinds[cls.__name__] = cls


A = TypeVar("A", bound=Message, covariant=True)


class Request(Message, Generic[A]):
    """A message that is answered with one of type A, or with `RequestFailed`, under the same number."""

    answer: ClassVar[type[Message]]  # the type of its answer

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is Request:
                (cls.answer,) = get_args(base)


@dataclass(frozen=True)
class Done(Message):
    """A request was carried out, and there is no more to say."""


@dataclass(frozen=True)
class RequestFailed(Message):
    """Why what was asked for could not be done."""

    what: str  # one sentence
    where: str = ""  # what it is about; empty for the machine itself
    mend: tuple[str, ...] = ()  # what to do about it
    traceback: str = ""  # where it is no mistake of the user's


@dataclass(frozen=True)
class Misunderstood(RequestFailed):
    """A message came that is of another version, or that doesn't fit its type."""


@functools.cache
def _adapter(kind: type[Message]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(message: Message, number: int = 0) -> bytes:
    """A message as a line; an answer bears its request's number, what is told unasked bears 0."""
    kind = type(message)
    content = {"v": VERSION, "is": kind.__name__, "id": number, "with": _adapter(kind).dump_python(message)}
    return json.dumps(content).encode() + b"\n"


# Of every line that `encode` makes.
_BEGINNING = b'{"v":'


def decode(line: bytes) -> tuple[int, Message] | None:
    """The number and message of a line; `Misunderstood` where it can't be read, None for a login shell's greeting."""
    try:
        content = parse_json(line, infinite=True)
    except ValueError as error:
        ours = line.startswith(_BEGINNING)
        return (0, Misunderstood(f"a message can't be read: {error}", mend=MEND)) if ours else None
    if not isinstance(content, dict):
        return None
    number = content.get("id")
    number = number if isinstance(number, int) else 0
    try:
        return number, _typed(content)
    except ValueError as error:
        return number, Misunderstood(f"a message can't be understood: {error}", mend=MEND)


def _typed(content: dict[str, Any]) -> Message:
    if content.get("v") != VERSION:
        raise ValueError(f"it is of version {content.get('v', 'unknown')}, and ours is {VERSION}")
    name = content.get("is")
    kind = Message.kinds.get(name) if isinstance(name, str) else None
    if not is_dataclass(kind):
        raise ValueError(f"nobody knows {name!r}")
    try:
        return _adapter(kind).validate_python(content.get("with"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from None


class Unacknowledged:
    """What one end has sent and the other may not have received: it is sent again over the next connection.

    Heartbeats don't count; they tell how many messages have been received.
    """

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._lines: deque[bytes] = deque()

    def add(self, line: bytes) -> None:
        """Keeps a line that is sent now."""
        self._sent += 1
        self._lines.append(line)

    def acknowledge(self, count: int) -> None:
        """Drops what the other end has received, so many messages since the conversation began."""
        while len(self._lines) > max(0, self._sent - count):
            self._lines.popleft()

    def lines(self) -> bytes:
        """All that may have been lost."""
        return b"".join(self._lines)


class Lines:
    """Puts together what comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def too_long(self) -> bool:
        """A line is longer than any message."""
        return len(self._rest) > LONGEST_LINE

    def take(self, received: bytes) -> list[tuple[int, Message]]:
        """The messages that are whole with what has come now, each with its number."""
        self._rest += received
        if b"\n" not in received:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [found for line in lines if (found := decode(line))]
