"""Runs plans on several processes, to time updates on random samples or to verify results."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from manyhands.core.devices import wait_for_device
from manyhands.core.world import World
from manyhands.data.order import BatchSharing, equal_share_function
from manyhands.parallel.apply import apply_mode, resolve_mode
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import LossFn, MicroBatch, MicroBatchShape, ModeRequest, ParallelNetwork
from manyhands.parallel.options import USUAL_MODE
from manyhands.parallel.plan import Plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms, measure_rows
from manyhands.parallel.split.execute import shard_tensor
from manyhands.parallel.split.network import shard_by_plan
from manyhands.planner.choose import time_in_rounds
from manyhands.planner.timing import BUSY, OtherLoad, Timing, time_function

# Smaller differences, relative to the network's largest gradient, are noise of values that should be zero, such as the
# gradient of a bias before a BatchNorm.
_NOISE = 1e-5
VERIFIED_WITHIN = 1e-9


@dataclass(frozen=True)
class PlanCase:
    """The network, loss and batch with which plans are timed and verified."""

    make: Callable[[], nn.Module]  # returns a new network in training mode, the same each time and on each process
    picture: Tensor  # one sample
    classes: int  # number of classes
    batch: int  # samples in an update
    loss: Callable[[], LossFn]  # returns the loss function, which returns (sum of losses, logits)
    smoothing: float = 0.0  # label smoothing
    cross_entropy: bool = True  # the loss function is plain cross-entropy, whose classes can be sharded
    norm_group: int = 0  # samples in a BatchNorm group; 0: no groups
    precision: str = "fp32"  # of the forward pass, as in train.precision
    micro_batch: int = 0  # maximum samples of a process in one forward and backward pass; 0: no limit
    shared_memory: bool = True  # data parallel may average gradients through shared memory
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-6, momentum=0.9
    )

    def samples(self) -> tuple[Tensor, Tensor]:
        """Returns random samples and labels, the same on all processes."""
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(self.batch, *self.picture.shape, generator=generator)
        labels = torch.randint(self.classes, (self.batch,), generator=generator)
        return pictures.to(self.picture), labels.to(self.picture.device)


class PlanRunner:
    """A network, sharded by a plan, that makes updates. Without a plan: data parallel, or a single process."""

    def __init__(self, case: PlanCase, plan: Plan | None, world: World) -> None:
        self.model = case.make().train()
        if plan:
            request = ModeRequest(plan=plan, picture=case.picture, cross_entropy=case.cross_entropy)
            self.network: ParallelNetwork = shard_by_plan(self.model, world, request)
        else:
            groups, _ = group_batch_norms(self.model)
            measure_rows(self.model, groups.layers, case.samples()[0][:2])
            data_parallel = ModeRequest(shared_memory=case.shared_memory)
            self.network = apply_mode(resolve_mode(USUAL_MODE, world), self.model, world, data_parallel)
        self._gradients = Gradients(
            self.network, world, case.loss(), smoothing=case.smoothing, precision=case.precision
        )
        self._batch, self._parts = case.batch, _micro_batches(case, self.network)
        self._optimizer = case.optimizer(self.model)

    def gradients(self) -> Tensor:
        """Computes and synchronizes gradients. Returns the summed loss of this rank, a scalar. A collective."""
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._parts[0].labels.device)
        for number, part in enumerate(self._parts, start=1):
            found = self._gradients.forward_backward(part, self._batch, last=number == len(self._parts))
            total = total + found.loss if found.count else total.to(found.loss.dtype)
        self._gradients.finish()
        return total

    def update(self) -> None:
        self.gradients()
        self._gradients.unscale(self._optimizer)
        self._gradients.update_running_statistics()
        self._gradients.step(self._optimizer)


def _micro_batches(case: PlanCase, network: ParallelNetwork) -> list[MicroBatch]:
    batch, group = case.batch, case.norm_group
    batch_sharing = BatchSharing(network.share.parts, case.micro_batch, group, aligned=not network.share.together)
    samples, labels = case.samples()
    found: list[MicroBatch] = []
    for shares in batch_sharing.micro_batches(batch):
        whole, mine = (shares[0].start, shares[-1].stop), shares[network.share.index]
        first = min(mine.start, batch - 1)  # a process without samples computes one sample that doesn't count
        rows = slice(first, max(mine.stop, first + 1))
        shape = MicroBatchShape(whole[1] - whole[0], batch, equal_share_function(batch, group, whole))
        found.append(MicroBatch(samples[rows], labels[rows], mine, shape))
    return found


Plans = Mapping[str, Plan | None]  # by name; None: data parallel


def time_plans(case: PlanCase, plans: Plans, world: World, rounds: int = 8) -> dict[str, list[float]]:
    """Returns {plan: seconds of an update on the slowest rank in each round}. All processes must call this."""
    runners = {name: PlanRunner(case, plan, world) for name, plan in plans.items()}

    def slowest(name: str) -> float:
        wait_for_device(world.device)
        dist.barrier()
        start = time.perf_counter()
        runners[name].update()
        wait_for_device(world.device)
        taken = torch.tensor(time.perf_counter() - start, device=world.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    try:
        return time_in_rounds(list(plans), slowest, rounds)
    finally:
        for runner in runners.values():
            runner.network.close()


@dataclass(frozen=True)
class Verification:
    """The largest difference between an update under a plan and the same update on one process."""

    worst: float  # largest difference, relative to the tensor's largest value
    where: str  # the tensor with that difference, or "loss"
    compared: int  # number of tensors

    @property
    def holds(self) -> bool:
        return self.worst <= VERIFIED_WITHIN

    def as_plain(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def verify_plan(case: PlanCase, plan: Plan, world: World) -> Verification:
    """Compares an update under a plan with an unsharded update, in double precision. All processes must call this.

    Each process computes the unsharded update and compares its own shards. Dropout is disabled, because a sharded
    network draws different masks.
    """
    make, picture = lambda: _without_dropout(case.make().double()), case.picture.double()
    exact = replace(case, make=make, picture=picture, precision="fp64", micro_batch=0)
    alone, cut = PlanRunner(exact, None, World(device=world.device)), PlanRunner(exact, plan, world)
    try:
        expected, total = alone.gradients(), cut.gradients()
        alone.network.finish_update()
        cut.network.finish_update()
        dist.all_reduce(total)
        errors = {"loss": float((total - expected).abs() / expected.abs().clamp_min(1e-12))}
        errors |= _largest_differences(alone.model, cut)
    finally:
        cut.network.close()
    values = torch.tensor(list(errors.values()), dtype=torch.float64, device=world.device).nan_to_num(nan=math.inf)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    place = int(values.argmax())
    return Verification(float(values[place]), list(errors)[place], len(errors))


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":
            setattr(module, "p", 0.0)  # noqa: B010 - torch's types know no numbers as attributes
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def _largest_differences(whole: nn.Module, cut: PlanRunner) -> dict[str, float]:
    """Returns {name: largest difference, relative to the tensor's largest value} of all gradients and buffers."""
    expected, found = (
        {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        for model in (whole, cut.model)
    )
    least = _NOISE * max((float(one.abs().max()) for one in expected.values() if one.numel()), default=1.0)
    moved = {name: one for name, one in whole.named_buffers() if one.is_floating_point()}
    found |= {name: one for name, one in cut.model.named_buffers() if name in moved}
    errors, layouts = dict[str, float](), cut.network.layouts
    for name, tensor in (expected | moved).items():
        if name in layouts:
            mine, piece = shard_tensor(tensor, layouts[name], layouts.mesh, layouts.rank), found.get(name)
            if piece is None or mine.shape != piece.shape:
                errors[name] = math.inf
            elif mine.numel():
                errors[name] = float((mine - piece).abs().max()) / max(float(tensor.abs().max()), least)
            else:
                errors[name] = 0.0
    return errors


_MOST_REPEATS = 7
_MIN_SAMPLES = 2  # BatchNorm needs two samples for a variance


def time_share(case: PlanCase, processes: int, threads: int = 0, budget_s: float = 10.0) -> Timing:
    """Times an update of this process alone, with the largest share of a batch that `processes` processes divide.

    `threads`: CPU threads; 0: unchanged. If the case has micro-batches, times one and scales its time to the share.
    """
    share = max(_MIN_SAMPLES, -(-case.batch // processes))
    timed = min(share, max(_MIN_SAMPLES, case.micro_batch or share))
    device, before = str(case.picture.device), torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        runner, others = PlanRunner(replace(case, batch=timed, micro_batch=0), None, World(device=device)), OtherLoad()
        runner.update()
        found = time_function(runner.update, device, _MOST_REPEATS, budget_s, busy=others.share() > BUSY)
        return Timing(found.seconds * (share / timed), found.spread)
    finally:
        torch.set_num_threads(before)
