"""Several processes that do one thing: a failure on one is learnt by all, so that none waits for it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checkpoint.refuse import NotFiniteError, SaveError
from manyhands.checkpoint.stream import as_bytes
from manyhands.checkpoint.verify import TornCheckpointError
from manyhands.core.errors import ManyhandsError, RunError, UserError

T = TypeVar("T")

# The narrower ones first.
_ERRORS: dict[str, type[ManyhandsError]] = {
    kind.__name__: kind for kind in (NotFiniteError, SaveError, TornCheckpointError, UserError, RunError)
}


@dataclass(frozen=True)
class CheckpointGroup:
    """The processes that save or load together."""

    rank: int = 0  # this process's, which is its place in the mesh too
    size: int = 1  # how many they are
    # gives every process's JSON data by rank, on every process; a collective
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    device: str = "cpu"  # torch's name of the device that tensors are sent from and to
    # who writes what is saved whole, rank 0 first; each with the ranks of its machine, of which it is the first
    writers: Mapping[int, range] = field(default_factory=lambda: {0: range(1)})


def together(peers: CheckpointGroup, work: Callable[[], T]) -> list[T]:
    """All processes' results (JSON data); a collective. Raises ManyhandsError: that of the first that failed."""
    own: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must learn of it before it is raised
        own = error
    answers = peers.gather({"result": result} if own is None else {"error": _as_plain(own)})
    failed = next((rank for rank, answer in enumerate(answers) if "error" in answer), None)
    if failed is None:
        return [answer["result"] for answer in answers]
    if own is not None and failed == peers.rank:
        raise own
    raise _from_plain(answers[failed]["error"], failed) from own


def send(tensor: Tensor, to: int, peers: CheckpointGroup) -> None:
    """Sends a tensor's values; the other one calls `receive`."""
    if tensor.numel():
        dist.send(as_bytes(tensor).to(peers.device), dst=to)


def receive(shape: tuple[int, ...], dtype: torch.dtype, source: int, peers: CheckpointGroup) -> Tensor:
    """Receives the values of a tensor of known shape and type, as a CPU tensor."""
    count = math.prod(shape) * dtype.itemsize
    buffer = torch.empty(count, dtype=torch.uint8, device=peers.device)
    if count:
        dist.recv(buffer, src=source)
    return buffer.cpu().view(dtype).reshape(shape)


def _as_plain(error: Exception) -> dict[str, Any]:
    if isinstance(error, ManyhandsError):
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), RunError.__name__)
        return {"kind": kind, "what": error.message, "where": error.where, "hints": list(error.hints)}
    return {"kind": RunError.__name__, "what": f"{type(error).__name__}: {error}", "where": "", "hints": []}


def _from_plain(content: dict[str, Any], rank: int) -> ManyhandsError:
    where = f"rank {rank}: {content['where']}" if content["where"] else f"rank {rank}"
    return _ERRORS[content["kind"]](content["what"], where, tuple(content["hints"]))
