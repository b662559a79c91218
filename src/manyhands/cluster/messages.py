"""Messages between a launcher and its agents: typed values, each one line of JSON with its version and number.

The packages that use them define their kinds. Nothing is unpickled, and a value of another type is refused.
"""

import functools
import json
from collections import deque
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from manyhands.core.files import parse_json

# Both ends must be of one version. It grows with every change of a message.
VERSION = 6
# What may stand in one line; a machine's whole code may be in a request, a run's records in an answer.
LONGEST_LINE = 64 * 1024 * 1024
HINTS = ("install the same version of manyhands on all machines",)


class Message:
    """Base class of all messages; each kind is a frozen dataclass, identified by its name."""

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
    """The answer to a request that was carried out."""


@dataclass(frozen=True)
class RequestFailed(Message):
    """The answer to a request that failed."""

    what: str  # one sentence
    where: str = ""  # what it is about; empty for the machine itself
    hints: tuple[str, ...] = ()  # what to do about it
    traceback: str = ""  # where it is no mistake of the user's


@dataclass(frozen=True)
class Misunderstood(RequestFailed):
    """The answer to a message of another version, or one that does not fit its type."""


@functools.cache
def _adapter(kind: type[Message]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(message: Message, number: int = 0) -> bytes:
    """Returns a message as a line; an answer has its request's number, an event has 0."""
    kind = type(message)
    content = {"v": VERSION, "is": kind.__name__, "id": number, "with": _adapter(kind).dump_python(message)}
    return json.dumps(content).encode() + b"\n"


# Of every line that `encode` makes.
_BEGINNING = b'{"v":'


def decode(line: bytes) -> tuple[int, Message] | None:
    """Returns the number and message of a line; `Misunderstood` for invalid ones, None for a login shell's output."""
    try:
        content = parse_json(line, infinite=True)
    except ValueError as error:
        ours = line.startswith(_BEGINNING)
        return (0, Misunderstood(f"a message can't be read: {error}", hints=HINTS)) if ours else None
    if not isinstance(content, dict):
        return None
    number = content.get("id")
    number = number if isinstance(number, int) else 0
    try:
        return number, _typed(content)
    except ValueError as error:
        return number, Misunderstood(f"invalid message: {error}", hints=HINTS)


def _typed(content: dict[str, Any]) -> Message:
    if content.get("v") != VERSION:
        raise ValueError(f"protocol version {content.get('v', 'unknown')}, expected {VERSION}")
    name = content.get("is")
    kind = Message.kinds.get(name) if isinstance(name, str) else None
    if not is_dataclass(kind):
        raise ValueError(f"unknown message type {name!r}")
    try:
        return _adapter(kind).validate_python(content.get("with"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from None


class Unacknowledged:
    """Messages sent that the peer may not have received, for sending them again over the next connection.

    Heartbeats acknowledge the other messages, by their number, and are not counted.
    """

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._lines: deque[bytes] = deque()

    def add(self, line: bytes) -> None:
        """Adds a line that is sent now."""
        self._sent += 1
        self._lines.append(line)

    def acknowledge(self, count: int) -> None:
        """Drops the messages that the peer has received, `count` of them since the start."""
        while len(self._lines) > max(0, self._sent - count):
            self._lines.popleft()

    def lines(self) -> bytes:
        """Returns all lines that may have been lost."""
        return b"".join(self._lines)


class Lines:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def too_long(self) -> bool:
        """Whether a line is longer than any message."""
        return len(self._rest) > LONGEST_LINE

    def take(self, received: bytes) -> list[tuple[int, Message]]:
        """Adds bytes; returns the messages that are complete now, each with its number."""
        self._rest += received
        if b"\n" not in received:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [found for line in lines if (found := decode(line))]
