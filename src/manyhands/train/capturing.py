"""Whether a trainer's usual passes are replayed from CUDA graphs: where that computes the same, and pays.

Decided before the first update. What is tried leaves network, buffers, optimizer and generators as they were.
"""

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands.config.load import written_values
from manyhands.core.errors import RunError, UserError
from manyhands.core.seeds import derive
from manyhands.data.loader import Batch
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import MicroBatch, ParallelNetwork
from manyhands.parallel.norm import GroupedNorm
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.train.captured import CapturedPasses, capture_for
from manyhands.train.draws import drawing
from manyhands.train.feed import LoadedMicroBatch
from manyhands.train.rehearse import first_samples, left_as_it_was, now
from manyhands.train.trainer import Trainer

KEY = "train.cuda_graphs"
_OFF = f"--set {KEY}=false"
LEAST_GAIN = 1.05
# Kinds of passes of one update: the usual one, and a smaller last micro-batch.
_KINDS = 2
# A replay may differ from a pass by so much of a tensor's length: one digit of what products are computed in, tf32 for
# fp32. Sums may come in another order, and kernels be chosen anew; a wrong branch is far outside. Where the job asks
# for torch's deterministic algorithms a replay may differ by nothing.
_DIGIT = {"fp64": 1e-10, "fp32": 2**-10, "fp16": 2**-10, "bf16": 2**-7}
# Where a tensor's gradient is next to nothing, such as a bias's before BatchNorm, so much of all gradients' is.
_BESIDES = 0.01
_HELD = (bool, int, float, str, Tensor)
_SEEDS, _ROUNDS, _PASSES, _ROUND_S = 2, 3, 10, 0.1


@dataclass(frozen=True)
class PassPair:
    """Two passes of one kind, of different samples."""

    first: MicroBatch
    second: MicroBatch
    divisor: float  # what the update's sum of losses is divided by


def captured(trainer: Trainer) -> Trainer:
    """Has the trainer's usual passes replayed where its job asks for that, or leaves it to this; a collective.

    Raises:
        UserError: the job wants it where it can't be.
    """
    wanted = trainer.job.train.cuda_graphs
    if wanted is False or trainer.done():
        return trainer
    unfit = _unfit(trainer)
    if unfit and wanted == "auto":
        return trainer
    kept = broadcast_plain(_kept(trainer) if trainer.world.is_main else None, trainer.world)
    if unfit and not kept:
        raise UserError(f"nothing can be replayed from CUDA graphs: {unfit}", KEY, ("leave it out",))
    if unfit:
        trainer.journal.event("warning", f"this run replayed CUDA graphs, which can't be had here: {unfit}")
        return trainer
    if kept is False and wanted == "auto":
        return _decided(trainer, replays=False)
    trial = CaptureTrial(trainer)
    measures = wanted == "auto" and kept is None
    found: list[Any] = gather_plain(trial.find(measures=measures), trainer.world)
    refused = next((why for why, _ in found if why), "")
    gain = min(gain for _, gain in found)
    if refused or (measures and gain < LEAST_GAIN):
        trial.passes.release()
        slow = f"true is {gain:.2f} times as fast, and only {LEAST_GAIN} pays"
        trainer.journal.event("warning" if wanted is True else "note", f"train.cuda_graphs is false: {refused or slow}")
        return _decided(trainer, replays=False)
    trainer.update.gradients.instead, release = trial.passes, trainer.release

    def release_both() -> None:
        trainer.update.gradients.instead = None
        trial.passes.release()
        release()

    trainer.release = release_both
    fast = f"{gain:.2f} times as fast in a short measurement" if measures else "the usual pass is replayed"
    trainer.journal.event("note", f"train.cuda_graphs is true: {fast}")
    return _decided(trainer, replays=True)


def _decided(trainer: Trainer, *, replays: bool) -> Trainer:
    train = trainer.job.train.model_copy(update={"cuda_graphs": replays})
    trainer.job = trainer.job.model_copy(update={"train": train})
    return trainer


def _kept(trainer: Trainer) -> bool | None:
    """What a run that has trained did; None where nothing was decided."""
    if not trainer.folder.exists() or not trainer.folder.has_trained():
        return None
    found = written_values(trainer.folder.job).get(KEY)
    return found if isinstance(found, bool) else None


def _unfit(trainer: Trainer) -> str:
    """Why no pass can be captured, as far as that is known; alike on all processes, a collective under some modes."""
    network, world, loss_fn = trainer.network, trainer.world, trainer.update.loss_fn
    if type(network) is not ParallelNetwork or network.call is not network.inner or network.collective_forward:
        return "processes take part in each other's passes; one process works, and a sync method that averages itself"
    if loss_fn is None or (loss_fn.weigh is not None and not loss_fn.is_sum):
        return "the loss weighs samples by their labels"
    mine = "" if capture_for(world.device) else f"this process computes on {world.device}"
    return next(filter(None, gather_plain(mine, world)), "")


class CaptureTrial:
    """Captures a trainer's passes, and says whether they may take its own passes' place."""

    def __init__(self, trainer: Trainer) -> None:
        update, world = trainer.update, trainer.world
        options, capture = update.options, capture_for(world.device)
        assert capture
        assert update.loss_fn
        self._trainer, self._network, self._world = trainer, trainer.network, world
        self._gradients, self._device = update.gradients, world.device.partition(":")[0]
        self._digit = 0.0 if options.deterministic else _DIGIT.get(options.precision, _DIGIT["fp32"])
        own = Gradients(
            trainer.network,
            world,
            update.loss_fn,
            smoothing=options.label_smoothing,
            precision=options.precision,
            mean=trainer.job.parallel.gradients_mean,
        )
        self.passes = CapturedPasses(update.gradients, own, capture)

    def find(self, *, measures: bool) -> tuple[str, float]:
        """Why passes can't be replayed, empty where they can, and how many times as fast they are (1: not measured).

        Raises:
            RunError: the card computes nothing any more after a capture that failed.
        """
        try:
            pairs = self._pairs()
            if not pairs:
                return "processes share groups of BatchNorm (train.norm_group), or this one has no samples", 1.0
            refused = self._refused(pairs)
            if not refused and measures and not self._waits_for_launches(pairs[0]):
                refused = "a pass takes the card far longer than to launch it"
        except Exception as error:  # noqa: BLE001 - the first update says it as it should be said
            return f"the pass itself fails ({_first_words(error)})", 1.0
        if refused:
            return refused, 1.0
        try:
            for pair in pairs:
                with left_as_it_was(self._network.inner, self._network.norms), self._seeded(0):
                    self.passes.add(pair.first, pair.divisor)
                refused = refused or self._differs(pair)
            return refused, self._gain(pairs[0]) if measures and not refused else 1.0
        except Exception as error:  # noqa: BLE001 - whatever a network does that a card can't record
            refused = f"the pass can't be captured ({_first_words(error)})"
            self._clean(pairs[0], refused)
            return refused, 1.0

    def _pairs(self) -> list[PassPair]:
        """Of each kind of a whole update's passes, the usual one first."""
        feed, network = self._trainer.feed, self._network
        count = min(feed.order.batch, feed.order.length)
        found: dict[Any, PassPair] = {}
        loss_fn = self._trainer.update.loss_fn
        divisor = 1.0 if loss_fn and loss_fn.is_sum else float(count)
        for shares in feed.cut.micro_batches(count):
            share = shares[network.replica(self._world.rank)]
            kind = share.count, share.spans
            if not share.count or share.shared_groups or kind in found or len(found) == _KINDS:
                continue
            batch = first_samples(feed.loader, min(2 * share.count, feed.order.length))
            turned = Batch(*(one[-share.count :].flip(0) for one in (batch.images, batch.labels, batch.samples)))
            batch = Batch(*(one[: share.count] for one in (batch.images, batch.labels, batch.samples)))
            bounds = shares[0].start, shares[-1].stop
            first, second = (
                LoadedMicroBatch(share, one, bounds, feed.cut.group).micro_batch(count, 0) for one in (batch, turned)
            )
            found[kind] = PassPair(first, second, divisor)
        return list(found.values())

    def _seeded(self, number: int) -> Any:
        return drawing(derive(self._trainer.job.train.seed, "capture", number), self._device)

    def _refused(self, pairs: list[PassPair]) -> str:
        """Why a replay would leave out something that the network's Python does; empty where it does nothing such."""
        model = self._network.inner
        if named := _hooked(model):
            return f"{named} has hooks, which a replay doesn't call"
        with left_as_it_was(model, self._network.norms), self._seeded(0) as drawn:
            self._gradients.forward_backward(pairs[0].first, pairs[0].divisor, last=False)
            held = _held(model)  # with what a first pass makes once
            self._gradients.forward_backward(pairs[0].first, pairs[0].divisor, last=False)
            if drawn(beside=True):
                return "the network draws numbers that don't come from the card's own generator"
        now_held = _held(model)
        changed = (name for name in held.keys() | now_held.keys() if not _same(held.get(name), now_held.get(name)))
        if name := min(changed, default=""):
            return f"each pass sets {name}, where a replay goes on with what it was"
        return ""

    def _waits_for_launches(self, pair: PassPair) -> bool:
        """False where the card takes far longer than to launch it: nothing to gain, and much memory to keep."""
        with left_as_it_was(self._network.inner, self._network.norms), self._seeded(0):
            self._gradients.forward_backward(pair.first, pair.divisor, last=False)
            began = now(self._world)
            self._gradients.forward_backward(pair.first, pair.divisor, last=False)
            launched = time.perf_counter()
            return now(self._world) - began < 2 * (launched - began)

    def _differs(self, pair: PassPair) -> str:
        """What two replays in a row make otherwise than two passes, of other samples, with other seeds."""
        before = self.passes.replays
        for seed in range(1, 1 + _SEEDS):
            wanted, found = (self._made(way, pair, seed) for way in (None, self.passes))
            for what, tensors in wanted.items():
                if named := _unlike(tensors, found[what], self._digit):
                    return f"a replay gives another {what} than the pass: {named}"
        if self.passes.replays != before + 2 * _SEEDS:
            return "the pass wasn't taken for one like that which was captured"
        return ""

    def _made(self, way: CapturedPasses | None, pair: PassPair, seed: int) -> dict[str, dict[str, Tensor]]:
        """All that two passes make, by kind and name."""
        model, layers = self._network.inner, self._network.norms.layers
        with left_as_it_was(model, self._network.norms), self._seeded(seed), self._taking(way):
            given = [
                self._gradients.forward_backward(part, pair.divisor, last=False) for part in (pair.second, pair.first)
            ]
            trained = {name: one.grad for name, one in model.named_parameters()}
            seen = {str(number): one.seen for number, one in enumerate(layers)}
            return {
                "gradient": {name: one for name, one in trained.items() if one is not None},
                "loss": {str(number): one.loss for number, one in enumerate(given)},
                "output": {str(number): one.logits for number, one in enumerate(given)},
                "buffer": {name: one.detach().clone() for name, one in model.named_buffers()},
                "BatchNorm statistic": {name: one for name, one in seen.items() if one is not None},
            }

    @contextmanager
    def _taking(self, way: CapturedPasses | None) -> Generator[None]:
        self._gradients.instead = way
        try:
            yield
        finally:
            self._gradients.instead = None

    def _gain(self, pair: PassPair) -> float:
        """How many times as fast replays are, the quickest of some rounds in turns."""
        best: dict[CapturedPasses | None, float] = {None: math.inf, self.passes: math.inf}
        count = 1
        with left_as_it_was(self._network.inner, self._network.norms), self._seeded(0):
            for number in range(1 + _ROUNDS):  # the first says how many passes make a round
                for way in best:
                    with self._taking(way):
                        began = now(self._world)
                        for _ in range(count):
                            for parameter in self._network.inner.parameters():
                                parameter.grad = None
                            self._gradients.forward_backward(pair.first, pair.divisor, last=False)
                        took = (now(self._world) - began) / count
                    best[way] = min(best[way], took) if number else math.inf
                    count = count if number else max(1, min(_PASSES, int(_ROUND_S / took)))
        return best[None] / best[self.passes]

    def _clean(self, pair: PassPair, refused: str) -> None:
        """Proves that the network's own pass still runs. Raises RunError: it doesn't."""
        try:
            self.passes.release()
            if self._device != "cpu":
                torch.cuda.empty_cache()
            with left_as_it_was(self._network.inner, self._network.norms), self._seeded(0):
                self._gradients.forward_backward(pair.first, pair.divisor, last=False)
            now(self._world)
        except RuntimeError as error:
            what = f"the card computes nothing any more after this: {refused}"
            raise RunError(what, KEY, (_OFF,)) from error


def _hooked(model: nn.Module) -> str:
    """The name of a layer or parameter that calls a function of somebody's in each pass; empty for none."""
    for name, layer in model.named_modules():
        own = vars(layer)
        if any(own[key] for key in own if key.endswith("_hooks") and ("forward" in key or "backward" in key)):
            return name or "the network"
    for name, one in model.named_parameters():
        if one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None):
            return name
    return ""


def _held(model: nn.Module) -> dict[str, Any]:
    """Numbers, words and tensors that layers hold, in lists too; but for what BatchNorm hands over."""
    return {
        f"{name}.{key.strip('_')}".removeprefix("."): [leaf for leaf in tree_leaves(value) if isinstance(leaf, _HELD)]
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if key != "seen" or not isinstance(layer, GroupedNorm)
    }


def _same(one: list[Any] | None, other: list[Any] | None) -> bool:
    """Whether two lists hold the same tensors, and equal numbers and words."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(a is b or not (isinstance(a, Tensor) or a != b) for a, b in zip(one, other, strict=True))


def _unlike(wanted: dict[str, Tensor], found: dict[str, Tensor], digit: float) -> str:
    """The name of a tensor that isn't what it should be, but for its last digits; else empty."""
    if wanted.keys() != found.keys():
        return next(iter(wanted.keys() ^ found.keys()))
    floats = {name: one.double() for name, one in wanted.items() if one.is_floating_point()}
    whole = _length(list(floats.values()))
    for name, one in wanted.items():
        if name not in floats:
            if not torch.equal(one, found[name]):
                return name
            continue
        apart = _length([floats[name] - found[name].double()])
        if not apart <= digit * (_length([floats[name]]) + _BESIDES * whole):
            return name
    return ""


def _length(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((one * one).sum()) for one in tensors))


def _first_words(error: BaseException) -> str:
    """What went wrong: the end of a capture that has failed fails too, and says less."""
    error = error.__context__ if error.__context__ and "captur" in str(error) else error
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
