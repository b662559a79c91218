"""Messages between a launcher and the agent process of each machine: dataclasses, each sent as a line of JSON.

The launcher calls methods of the agent that are marked `remote`:

    port = link.ask(call(Agent.bind, "127.0.0.1"), STORE_S)   # an int, as the method's annotation says

Each package defines the events that it sends. Nothing is unpickled; values of a wrong type are refused.
"""

import functools
import inspect
import json
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from manyhands.core.errors import ManyhandsError
from manyhands.core.files import parse_json

VERSION = 12  # of the protocol, equal at both ends; every change of a message increments it
LONGEST_LINE = 64 * 1024 * 1024  # bytes; a request may contain all code of a job


class Message:
    """Base class of all messages; each kind is a frozen dataclass, identified by its name."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Message.kinds[cls.__name__] = cls


@dataclass(frozen=True)
class Alive(Message):
    """A heartbeat, which the agent answers with a heartbeat; `received` is the number of messages received so far."""

    received: int = 0


@dataclass(frozen=True)
class Reconnected(Alive):
    """The agent's first message over a replaced connection, before the messages that may have been lost."""


@dataclass(frozen=True)
class Call(Message):
    """Calls a method of the agent; answered with `CallResult` or `RequestFailed` under the same id."""

    method: str
    arguments: dict[str, Any]  # by parameter name


@dataclass(frozen=True)
class CallResult(Message):
    """The return value of a method of the agent, sent with the id of the call."""

    value: Any = None


@dataclass(frozen=True)
class RequestFailed(Message):
    """The answer to a call that failed."""

    what: str  # one sentence
    where: str = ""  # empty for the machine itself
    hints: tuple[str, ...] = ()
    traceback: str = ""  # empty for a user's mistake


@dataclass(frozen=True)
class Misunderstood(RequestFailed):
    """The answer to a message with another protocol version or a wrong type."""

    hints: tuple[str, ...] = ("install the same version of manyhands on all machines",)


P = ParamSpec("P")
R = TypeVar("R", covariant=True)
M = TypeVar("M", bound=Callable[..., Any])
_remote: set[Callable[..., Any]] = set()


def remote(method: M) -> M:
    """Marks a method that a launcher may call; `perform` checks arguments against the method's annotations."""
    _remote.add(method)
    return method


@dataclass(frozen=True)
class Request(Generic[R]):
    """A call and its method. The method's return annotation is the type of the answer."""

    call: Call
    method: Callable[..., R]

    def result(self, answer: CallResult) -> R:
        """Returns the value of the answer. Raises ValueError if the value does not have the annotated type."""
        return _validated(self.call.method, _adapter(get_type_hints(self.method)["return"]), answer.value)


def call(method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Request[R]:
    """Returns the request that calls a remote method with the given arguments."""
    _, *arguments = inspect.signature(method).bind(None, *args, **kwargs).arguments.items()
    return Request(Call(method.__name__, dict(arguments)), method)


class InvalidCallError(ValueError):
    """Raised if there is no such remote method, or if the arguments have wrong names or types."""


def perform(agent: object, call: Call) -> Any:
    """Calls a remote method of `agent` and returns the result. Raises InvalidCallError for an invalid call."""
    method: Callable[..., Any] | None = getattr(type(agent), call.method, None)
    if method is None or method not in _remote:
        raise InvalidCallError(f"unknown method {call.method!r}")
    try:
        arguments = _validated(call.method, _arguments(method), call.arguments)
    except ValueError as error:
        raise InvalidCallError(error) from None
    return method(agent, **dict(arguments))


def reply_to(agent: object, call: Call) -> Message:
    """Calls a remote method of `agent`, and returns a message with the result or the error."""
    try:
        result = CallResult(perform(agent, call))
        encode(result)  # a result that can't be encoded fails the call, not the agent
        return result
    except InvalidCallError as error:
        return Misunderstood(f"invalid message: {error}")
    except ManyhandsError as error:
        return RequestFailed(error.message, error.where, error.hints)
    except Exception as error:  # noqa: BLE001 - reported to the launcher
        return RequestFailed(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


@functools.cache
def _arguments(method: Callable[..., Any]) -> TypeAdapter[Any]:
    hints, (_, *parameters) = get_type_hints(method), inspect.signature(method).parameters.values()
    fields: dict[str, Any] = {
        each.name: (hints[each.name], ... if each.default is each.empty else each.default) for each in parameters
    }
    return TypeAdapter(create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _validated(name: str, kind: TypeAdapter[Any], value: Any) -> Any:
    """Converts a value to a type. Raises ValueError, with `name` and the wrong field, if the value doesn't fit."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from None


def encode(message: Message, number: int = 0) -> bytes:
    """Returns a message as a line of JSON; `number` is the id of a call and of its answer, 0 for an event."""
    kind = type(message)
    content = {"v": VERSION, "is": kind.__name__, "id": number, "with": _adapter(kind).dump_python(message)}
    return json.dumps(content).encode() + b"\n"


def decode(line: bytes) -> tuple[int, Message] | None:
    """Returns (id, message) of a line; None for a login shell's output; a `Misunderstood` for an invalid message."""
    try:
        content = parse_json(line, infinite=True)
    except ValueError as error:
        ours = line.startswith(b'{"v":')
        return (0, Misunderstood(f"a message can't be read: {error}")) if ours else None
    if not isinstance(content, dict):
        return None
    number = found if isinstance(found := content.get("id"), int) else 0
    try:
        if content.get("v") != VERSION:
            raise ValueError(f"protocol version {content.get('v', 'unknown')}, expected {VERSION}")
        name = content.get("is")
        kind = Message.kinds.get(name) if isinstance(name, str) else None
        if not is_dataclass(kind):
            raise ValueError(f"unknown message type {name!r}")
        return number, _validated(str(name), _adapter(kind), content.get("with"))
    except ValueError as error:
        return number, Misunderstood(f"invalid message: {error}")


class MessageStream:
    """One end of a connection: splits received bytes into messages, and keeps sent messages until acknowledged.

    A heartbeat contains the number of other messages received so far, which acknowledges these messages.
    """

    def __init__(self) -> None:
        self.received = self._sent = 0  # counts of messages
        self._unacknowledged: deque[bytes] = deque()
        self._rest = bytearray()

    @property
    def too_long(self) -> bool:
        """True if an incomplete line is longer than any message."""
        return len(self._rest) > LONGEST_LINE

    def add(self, message: Message, number: int = 0) -> bytes:
        """Encodes a message to send now; keeps the line until acknowledged, unless it is a heartbeat."""
        line = encode(message, number)
        if not isinstance(message, Alive):
            self._sent += 1
            self._unacknowledged.append(line)
        return line

    def take(self, received: bytes) -> list[tuple[int, Message]]:
        """Adds received bytes; returns (id, message) for each message that is now complete."""
        self._rest += received
        if b"\n" not in received:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        messages = [found for line in lines if (found := decode(line))]
        for _, message in messages:
            if isinstance(message, Alive):
                self.acknowledge(message.received)
            else:
                self.received += 1
        return messages

    def acknowledge(self, count: int) -> None:
        """Drops the first `count` messages sent on this connection, because the peer has received them."""
        while len(self._unacknowledged) > max(0, self._sent - count):
            self._unacknowledged.popleft()

    @property
    def unacknowledged(self) -> bytes:
        """The lines of all messages that may have been lost with the last connection."""
        return b"".join(self._unacknowledged)

    def disconnect(self) -> None:
        """Drops an incomplete line of the last connection."""
        self._rest.clear()
