"""Conversations between machines that go on beside training.

A conversation is a generator: it starts a collective, yields it, and goes on when that is done. Whoever holds it looks
now and then whether it can go on (`Talk.advance`), or waits for its end (`Talk.result`). Each process takes the same
steps in the same order, so the result doesn't depend on when anybody looks. No thread is needed: the collectives of
gloo and NCCL run by themselves.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from manyhands.sync.codecs import Codec, chunk_values

T = TypeVar("T")

Conversation = Generator[Any, None, T]


@dataclass
class Peers:
    """Those who agree: one process of each party.

    Attributes:
        rank: this process's place among them.
        size: how many they are.
        group: their process group; None: all processes of the run.
        sent_bytes: counts what this process has sent in conversations.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sent_bytes: int = 0

    def exchange(self, parts: Tensor) -> tuple[Tensor, Any]:
        """Starts sending uint8 [size, n], row r to rank r; what comes, and the collective."""
        received = torch.empty_like(parts)
        self.sent_bytes += (self.size - 1) * parts[0].numel()
        return received, dist.all_to_all_single(received, parts, group=self.group, async_op=True)

    def gather(self, part: Tensor) -> tuple[Tensor, Any]:
        """Starts sending uint8 [n] to all; the rows [size, n] that come, and the collective."""
        received = part.new_empty(self.size, part.numel())
        self.sent_bytes += (self.size - 1) * part.numel()
        return received, dist.all_gather_into_tensor(received.view(-1), part, group=self.group, async_op=True)


class Talk(Generic[T]):
    """A conversation under way.

    Args:
        conversation: starts at once.
    """

    def __init__(self, conversation: Conversation[T]) -> None:
        self._conversation = conversation
        self._work: Any = None
        self._results: list[T] = []
        self._step()

    @property
    def done(self) -> bool:
        """True when the result is there."""
        return bool(self._results)

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; True when it is done."""
        while not self.done and self._work.is_completed():
            self._step()
        return self.done

    def result(self) -> T:
        """Waits for the end."""
        while not self.done:
            self._step()
        return self._results[0]

    def _step(self) -> None:
        if self._work is not None:
            self._work.wait()
        try:
            self._work = next(self._conversation)
        except StopIteration as stop:
            self._results.append(stop.value)


@dataclass
class Held:
    """What rounding has kept back from the values that a process sends.

    Attributes:
        own: of the values that it brought [n]; None before the first exchange.
        sums: of the part whose mean it computes for all [n / size]; None before the first exchange.
    """

    own: Tensor | None = None
    sums: Tensor | None = None


def mean_of(values: Tensor, codec: Codec, peers: Peers, sums_before: Tensor | None = None) -> Conversation[Any]:
    """The mean over all peers of vectors [n], equal to the last bit everywhere; a conversation.

    Each process adds up one part for all, in the order of ranks, and hands the rounded mean on.

    Args:
        values: this process's, of a floating type.
        codec: how they travel; both ways round.
        peers: who takes part.
        sums_before: what was kept back of the part that this process adds up; None for nothing.

    Returns:
        The agreed mean [n], and what was kept back: the mean over processes of (`own` + `sums` where it is theirs) and
        the agreed mean make up the mean of the values and of `sums_before`.
    """
    count = values.numel()
    if peers.size == 1:
        return values.clone(), Held(torch.zeros_like(values), None)
    chunk = chunk_values(count, peers.size)
    parts = F.pad(values, (0, chunk * peers.size - count)).view(peers.size, chunk)
    coded = codec.encode(parts)
    received, work = peers.exchange(coded)
    own = (parts - codec.decode(coded, values.dtype)).view(-1)[:count]
    yield work
    total = torch.zeros(chunk, dtype=values.dtype, device=values.device)
    for row in received:
        total += codec.decode(row, values.dtype)
    total /= peers.size
    if sums_before is not None:
        total += sums_before
    answer = codec.encode(total)
    everybody, work = peers.gather(answer)
    sums = total - codec.decode(answer, values.dtype)
    yield work
    return codec.decode(everybody, values.dtype).view(-1)[:count], Held(own, sums)
