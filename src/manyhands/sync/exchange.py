"""Exchanges between machines during training, and the codecs that send values as fewer bytes.

An exchange is a generator: it starts a collective, yields the work handle, and resumes when the collective is done. All
processes take the same steps in the same order, so the result doesn't depend on timing.

A codec rounds values and returns the rounding errors, which the sender adds to its next values (error feedback: Seide
et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847). Integers share a scale per
block, so that a large value reduces only the precision of its own block.
"""

import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from manyhands.sync.costs import BLOCK, SCALE_BYTES, values_per_machine

T = TypeVar("T")

# Between two polls of a collective; the longest wait for an exchange at the end, and for its thread after that.
_LOOK_S, _LONGEST_S, _LEAVES_S = 0.002, 60.0, 1.0

_SMALLEST = 1e-35  # the smallest divisor
_BIAS = 136  # packs two integers from -8 to 7 into one byte: 8 + 8 * 16

ExchangeSteps = Generator[Any, None, T]


@dataclass
class SyncGroup:
    """The processes that exchange values with each other, and the collectives of exchanges."""

    rank: int = 0  # this process's index in the group
    size: int = 1  # number of processes
    group: Any = None  # their process group; None: all processes of the run
    sent_bytes: int = 0  # bytes that this process has sent in exchanges

    def exchange(self, parts: Tensor) -> tuple[Tensor, Any]:
        """Starts an all-to-all of uint8 [size, n], row r to rank r. Returns (received rows, work handle)."""
        received = torch.empty_like(parts)
        self.sent_bytes += (self.size - 1) * parts[0].numel()
        return received, dist.all_to_all_single(received, parts, group=self.group, async_op=True)

    def gather(self, part: Tensor) -> tuple[Tensor, Any]:
        """Starts an all-gather of `part` uint8 [n]. Returns (received rows [size, n], work handle)."""
        received = part.new_empty(self.size, part.numel())
        self.sent_bytes += (self.size - 1) * part.numel()
        return received, dist.all_gather_into_tensor(received.view(-1), part, group=self.group, async_op=True)


def run_exchange(steps: ExchangeSteps[T]) -> T:
    """Runs all steps of an exchange, blocking, and returns its result."""
    while True:
        try:
            next(steps).wait()
        except StopIteration as stop:
            return stop.value


class AsyncExchange(Generic[T]):
    """An exchange that runs in a thread, or blocks if not `in_thread`. `seconds` is its duration, 0 until it ends."""

    def __init__(self, steps: ExchangeSteps[T], *, in_thread: bool = True) -> None:
        self._steps, self._began_s, self.seconds = steps, time.perf_counter(), 0.0
        self._results: list[T] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        # The first message is sent before training continues, because training changes the values.
        self._work = self._next()
        while not in_thread and not self._ended.is_set():
            self._work.wait()
            self._work = self._next()
        self._thread = threading.Thread(target=self._continue, name="manyhands exchange", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Waits for the end of the exchange, and returns its result. Raises RuntimeError if a collective failed."""
        self._thread.join()
        if self._error:
            raise self._error
        return self._results[0]

    def close(self) -> None:
        """Waits up to 60 s for the end of the exchange, so that its process group can be released."""
        self._ended.wait(_LONGEST_S)
        self._ended.set()
        self._thread.join(_LEAVES_S)  # a thread that still frees tensors while Python exits would abort the process

    def _continue(self) -> None:
        try:
            while not self._ended.is_set():
                while not self._work.is_completed():  # not wait(), which can't be interrupted when the process exits
                    if self._ended.is_set():
                        return
                    time.sleep(_LOOK_S)
                self._work.wait()
                self._work = self._next()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the result is wanted
            self._error = error
            self._ended.set()

    def _next(self) -> Any:
        try:
            return next(self._steps)
        except StopIteration as stop:
            self._results.append(stop.value)
            self.seconds = time.perf_counter() - self._began_s
            self._ended.set()
        return None


class CollectiveQueue(Generic[T]):
    """Runs several exchanges of one group, and starts their collectives in the same order on all processes.

    Each exchange has `messages` collectives. The first one starts before the last one of the preceding exchange, so the
    link is never idle while data waits. `results` maps the indices of finished exchanges to their results.
    """

    def __init__(self, exchanges: int, messages: int = 2) -> None:
        places = sorted((number + 1.5 * message, number) for number in range(exchanges) for message in range(messages))
        self._order = deque(number for _, number in places)
        self._exchanges: list[ExchangeSteps[T]] = []
        self._works: dict[int, Any] = {}
        self.results: dict[int, T] = {}

    @property
    def in_progress(self) -> bool:
        return len(self.results) < len(self._exchanges)

    def add(self, steps: ExchangeSteps[T]) -> None:
        self._exchanges.append(steps)

    def advance(self) -> None:
        """Starts the collectives that are next, without waiting for any. Raises RuntimeError if a collective failed."""
        while self._order and self._advance_one(self._order[0]):
            self._order.popleft()
        for number in range(len(self._exchanges)):
            if number not in self.results and number not in self._order:
                self._advance_one(number)

    def _advance_one(self, number: int) -> bool:
        if number in self.results:
            return True
        if number >= len(self._exchanges):
            return False
        work = self._works.get(number)
        if work is not None:
            if not work.is_completed():
                return False
            work.wait()
        try:
            self._works[number] = next(self._exchanges[number])
        except StopIteration as stop:
            self.results[number] = stop.value
        return True


class FloatCodec:
    """A codec that converts values to a floating-point dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        coded = values.to(self._dtype).contiguous()
        return coded.view(torch.uint8), values - coded.to(values.dtype)

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        return coded.view(self._dtype).to(dtype)


class IntegerCodec:
    """A codec of 8-bit or 4-bit integers. Every `block` values share a scale. BLOCK is a multiple of `block`."""

    def __init__(self, bits: int, block: int = BLOCK) -> None:
        self._bits, self._block = bits, block
        self._most = 2 ** (bits - 1) - 1

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds scaled values to integers. If a block has an infinite or NaN value, the entire block becomes NaN."""
        blocks = values.to(torch.float32).unflatten(-1, (-1, self._block))
        # bfloat16 has the range of a float32, and gradients may be small.
        scales = (blocks.abs().amax(-1, keepdim=True) / self._most).to(torch.bfloat16)
        scales = torch.where(scales.isinf(), torch.nan, scales.clamp(min=_SMALLEST))
        factors = scales.float()
        whole = (blocks / factors).round_().clamp_(-self._most, self._most)
        lost = values - (whole * factors).flatten(-2).to(values.dtype)
        if self._bits == 4:
            pairs = whole.flatten(-2).unflatten(-1, (-1, 2))
            packed = torch.add(pairs[..., 0], pairs[..., 1], alpha=16).add_(_BIAS).to(torch.uint8)
        else:
            packed = whole.flatten(-2).to(torch.int8).view(torch.uint8)
        return torch.cat([packed, scales.flatten(-2).view(torch.uint8)], -1), lost

    def decode(self, coded: Tensor, dtype: torch.dtype) -> Tensor:
        per_block = self._block * self._bits // 8 + SCALE_BYTES
        blocks = coded.shape[-1] // per_block
        packed, scales = coded.split([coded.shape[-1] - blocks * SCALE_BYTES, blocks * SCALE_BYTES], -1)
        if self._bits == 4:
            whole = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.float32).sub_(8)
        else:
            whole = packed.view(torch.int8).to(torch.float32)
        factors = scales.contiguous().view(torch.bfloat16).to(torch.float32)
        return whole.unflatten(-1, (-1, self._block)).mul_(factors[..., None]).flatten(-2).to(dtype)


# `encode` converts values [..., n], n a multiple of BLOCK, to uint8 and rounding errors; `decode` returns [..., n].
Codec = FloatCodec | IntegerCodec


def create_codec(name: str, dtype: torch.dtype) -> Codec:
    """Creates the codec `name`: none, bf16, int8 or int4. The codec "none" sends values as `dtype`."""
    if name == "none":
        return FloatCodec(dtype)
    return FloatCodec(torch.bfloat16) if name == "bf16" else IntegerCodec(8 if name == "int8" else 4)


@dataclass
class Residual:
    """The rounding errors of one exchange, on one process."""

    own: Tensor  # of the process's values [n]
    sums: Tensor | None  # of the share [n / size] whose mean the process computes for all; None for a single process

    def combined(self, peers: SyncGroup) -> Tensor:
        """Returns the sum of `own` and `sums` [n]. Its mean over all processes is the error of the exchanged mean."""
        kept = self.own.clone()
        if self.sums is not None:
            part = kept[peers.rank * self.sums.numel() :][: self.sums.numel()]
            part.add_(self.sums[: part.numel()], alpha=peers.size)
        return kept


def average_vector(
    values: Tensor, codec: Codec, peers: SyncGroup, sums_before: Tensor | None = None
) -> ExchangeSteps[Any]:
    """Averages `values` [n] over all peers. The exchange returns (mean [n], bitwise equal on all peers; Residual).

    Each process averages one share of the values and sends the rounded result to all. `sums_before`: `Residual.sums` of
    the previous exchange; None: there is none.
    """
    count = values.numel()
    if peers.size == 1 or not count:
        return values.clone(), Residual(torch.zeros_like(values), None)
    chunk = values_per_machine(count, peers.size)
    parts = F.pad(values, (0, chunk * peers.size - count)).view(peers.size, chunk)
    coded, own = codec.encode(parts)
    received, work = peers.exchange(coded)
    yield work
    total = codec.decode(received, values.dtype).sum(0).div_(peers.size)
    if sums_before is not None:
        total += sums_before
    answer, sums = codec.encode(total)
    everybody, work = peers.gather(answer)
    yield work
    own = own.view(-1)[:count]
    return codec.decode(everybody, values.dtype).view(-1)[:count], Residual(own, sums)
