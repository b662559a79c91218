"""Runs plans on live processes: times whole updates on random samples, or proves them against one process."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from manyhands.core.layouts import TensorLayout, bounds
from manyhands.core.world import World
from manyhands.data.order import Cut
from manyhands.parallel.apply import apply_mode
from manyhands.parallel.execute import cut_tensor
from manyhands.parallel.grid import Grid
from manyhands.parallel.network import Criterion, How, PassShape
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.plan import Plan
from manyhands.parallel.split import split
from manyhands.planner.choose import Finalist, time_in_turns
from manyhands.planner.collectives import shares

# Differences below this share of the network's largest gradient are noise of values that should be zero.
_NOISE = 1e-6
PROVEN = 1e-9


@dataclass(frozen=True)
class Case:
    """What is tried.

    Attributes:
        make: a new network in training, the same each time and on each process.
        picture: one sample.
        classes: of the labels.
        batch: samples in an update.
        criterion: the loss's sum, and the logits.
        smoothing: of labels.
        cross_entropy: the criterion is plain cross-entropy, whose classes can be cut.
        norm_group: samples that BatchNorm takes its statistics over; 0 where there are none.
        optimizer: made for the parameters.
    """

    make: Callable[[], nn.Module]
    picture: Tensor
    classes: int
    batch: int
    criterion: Criterion
    smoothing: float = 0.0
    cross_entropy: bool = True
    norm_group: int = 0
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-6, momentum=0.9
    )

    def samples(self) -> tuple[Tensor, Tensor]:
        """The same random samples and labels on all processes."""
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(self.batch, *self.picture.shape, generator=generator)
        labels = torch.randint(self.classes, (self.batch,), generator=generator)
        return pictures.to(self.picture), labels.to(self.picture.device)


class Split:
    """A network under a plan, with what an update needs."""

    def __init__(self, case: Case, plan: Plan, world: World) -> None:
        self.model = case.make().train()
        self._network = split(self.model, world, How(plan=plan, picture=case.picture, cross_entropy=case.cross_entropy))
        cutting = self._network.cutting
        if cutting is None:
            raise RuntimeError("a network that was split knows how it is cut")
        self.cutting = cutting
        self._judge = cutting.judge(case.criterion, case.smoothing)
        self._shape = PassShape(case.batch, case.batch, shares(case.batch, case.norm_group))
        edges = bounds(case.batch, cutting.replicas)
        rows = slice(edges[cutting.replica], edges[cutting.replica + 1])
        self._samples, self._labels = (whole[rows] for whole in case.samples())
        self._batch = case.batch
        self._optimizer = case.optimizer(self.model)

    def backward(self) -> Tensor:
        """Forward, backward and all collectives; this process's part of the loss's sum []."""
        self._optimizer.zero_grad()
        self.cutting.begin_pass(self._shape)
        loss, _, _ = self._judge(self._network.call(self._samples), self._labels)
        (loss / self._batch).backward()
        self.cutting.finish_backward()
        self.cutting.finish_update()
        return loss.detach() if self.cutting.counts else torch.zeros_like(loss.detach())

    def update(self) -> None:
        """A whole update."""
        self.backward()
        self._optimizer.step()

    def release(self) -> None:
        """Gives groups and hooks back."""
        self.cutting.release()


class Whole:
    """The same network data parallel, by the mode `data` itself; or on one process."""

    def __init__(self, case: Case, world: World) -> None:
        self.model = case.make().train()
        self._groups, _ = group_batch_norms(self.model)
        share = Cut(world.size, 0, case.norm_group).passes(case.batch)[0][world.rank]
        mode = "single" if world.alone else "data"
        self._network = apply_mode(mode, self.model, world, How())
        samples, labels = case.samples()
        self._samples, self._labels = samples[share.start : share.stop], labels[share.start : share.stop]
        self._share, self._case, self._world = share, case, world
        self._optimizer = case.optimizer(self.model)

    def backward(self) -> Tensor:
        """Forward, backward and all collectives; this process's part of the loss's sum []."""
        self._optimizer.zero_grad()
        share, batch = self._share, self._case.batch
        self._groups.begin_pass(share.spans, share.shared_groups, share.count, batch)
        loss, _ = self._case.criterion(self._network.call(self._samples), self._labels)
        (loss * (self._network.gradient_scale / batch)).backward()
        self._groups.finish_update(self._world.size)
        return loss.detach()

    def update(self) -> None:
        """A whole update."""
        self.backward()
        self._optimizer.step()

    def release(self) -> None:
        """Nothing to give back."""


def measure(case: Case, plans: Mapping[str, Plan | None], world: World, rounds: int = 8) -> dict[str, list[float]]:
    """Seconds of an update under each plan in each round, on the slowest process; all processes get the same.

    Args:
        case: what is tried.
        plans: by name; None for data parallel.
        world: who takes part.
        rounds: in each of them all plans have a turn.
    """
    runners = {name: Split(case, plan, world) if plan else Whole(case, world) for name, plan in plans.items()}
    finalists: Sequence[Finalist[str]] = [Finalist(name, name, 0.0) for name in plans]
    try:
        return time_in_turns(finalists, lambda name: _slowest(runners[name].update, world), rounds)
    finally:
        for runner in runners.values():
            runner.release()


def _slowest(update: Callable[[], None], world: World) -> float:
    _wait(world)
    dist.barrier()
    start = time.perf_counter()
    update()
    _wait(world)
    taken = torch.tensor(time.perf_counter() - start, device=world.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _wait(world: World) -> None:
    if world.device != "cpu":
        torch.accelerator.synchronize()


@dataclass(frozen=True)
class Proof:
    """How far a plan's update is from that of one process.

    Attributes:
        worst: the largest difference, as a share of the tensor's largest value.
        where: the tensor it is in, or "loss".
        compared: how many tensors were compared.
    """

    worst: float
    where: str
    compared: int

    @property
    def holds(self) -> bool:
        """Whether the plan computes the same."""
        return self.worst <= PROVEN

    def as_plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"worst": self.worst, "where": self.where, "compared": self.compared, "holds": self.holds}


def verify(case: Case, plan: Plan, world: World) -> Proof:
    """Compares one update under a plan with one process's, in double precision, on random samples.

    Every process computes the whole and compares its own pieces; all get the same answer. Dropout is left out, since
    a split network draws other masks.
    """
    exact = replace(case, make=lambda: _without_chance(case.make().double()), picture=case.picture.double())
    alone = Whole(exact, World(device=world.device))
    expected = alone.backward()
    cut = Split(exact, plan, world)
    try:
        total = cut.backward()
        dist.all_reduce(total)
        errors = {"loss": float((total - expected).abs() / expected.abs().clamp_min(1e-12))}
        errors |= _differences(alone.model, cut)
        return _worst(errors, world)
    finally:
        cut.release()


def _without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":
            setattr(module, "p", 0.0)  # noqa: B010 - torch's types know no numbers as attributes
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def _differences(whole: nn.Module, cut: Split) -> dict[str, float]:
    """Of each gradient and buffer, as a share of its largest value."""
    expected = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    found: dict[str, Tensor] = {name: one.grad for name, one in cut.model.named_parameters() if one.grad is not None}
    least = _NOISE * max((float(one.abs().max()) for one in expected.values() if one.numel()), default=1.0)
    moved = {name: one for name, one in whole.named_buffers() if one.is_floating_point()}
    expected |= moved
    found |= {name: one for name, one in cut.model.named_buffers() if name in moved}
    return {
        name: _difference(tensor, found.get(name), cut.cutting.layouts[name], cut.cutting.grid, least)
        for name, tensor in expected.items()
        if name in cut.cutting.layouts
    }


def _difference(whole: Tensor, piece: Tensor | None, layout: TensorLayout, grid: Grid, least: float) -> float:
    if piece is None:
        return math.inf
    mine = cut_tensor(whole, layout, grid)
    if mine.shape != piece.shape:
        return math.inf
    return float((mine - piece).abs().max()) / max(float(whole.abs().max()), least) if mine.numel() else 0.0


def _worst(errors: dict[str, float], world: World) -> Proof:
    names = list(errors)
    values = torch.tensor([errors[name] for name in names], dtype=torch.float64, device=world.device)
    # What is no number must not lose against one.
    values = values.nan_to_num(nan=math.inf)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    place = int(values.argmax())
    return Proof(float(values[place]), names[place], len(names))
