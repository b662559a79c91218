"""Forward, loss and backward of a network in any parallel mode. No other file calls a tensor's `backward()`."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from manyhands.core import devices, phases
from manyhands.core.world import World
from manyhands.parallel.network import LossFn, MicroBatch, ParallelNetwork

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: str) -> contextlib.AbstractContextManager[object]:
    """Returns an autocast context for a job's precision, such as "bf16", and a device, such as "cuda:0"."""
    kind = AUTOCAST.get(precision)
    return torch.autocast(device.partition(":")[0], dtype=kind) if kind else _AS_IT_IS


@dataclass(slots=True)  # not frozen: creation would take three times as long
class MicroBatchResult:
    """The result of a forward pass of a micro-batch."""

    loss: Tensor  # sum [] of this process's losses
    logits: Tensor  # [n, C]
    labels: Tensor  # int64 [n]
    count: int  # samples that this process reports; 0 if another process reports them


_AS_IT_IS = contextlib.nullcontext()  # shared, to avoid creating one in every update


class Gradients:
    """Accumulates a network's gradients over the micro-batches of an update, in the precision of a job.

    Without `loss_fn`, the user calls `backward_of`. `smoothing`: label smoothing of cross-entropy over sharded classes.
    With precision "fp16", the loss is scaled. Without `mean`, gradients are summed over processes, not averaged.
    """

    def __init__(
        self,
        network: ParallelNetwork,
        world: World,
        loss_fn: LossFn | None = None,
        *,
        smoothing: float = 0.0,
        precision: str = "fp32",
        mean: bool = True,
    ) -> None:
        self.network, self.world, self.precision = network, world, precision
        self.scaler = torch.amp.GradScaler(world.device.partition(":")[0]) if precision == "fp16" else None
        self.on_card = devices.is_accelerator(world.device)
        self.flat: list[Tensor] = []  # tensors [n] that hold all gradients of the update; see `finish_gradients`
        self.spoilt: Tensor | None = None  # 1.0 [] if the accelerator skipped the last update; see `unscale`
        self._begin, self._goes_with = torch.ones(()), (1.0, torch.float32, torch.device("cpu"))
        self._loss_fn = network.loss_fn(loss_fn, smoothing) if loss_fn else None
        self._scale = network.traits.gradient_scale * (1 if mean else network.share.parts)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return autocast(self.precision, self.world.device)

    @contextlib.contextmanager
    def custom_forward(self, *, last: bool) -> Iterator[None]:
        """A context for the user's own forward and `backward_of`. `last` is True for an update's last micro-batch."""
        with _AS_IT_IS if last else self.network.traits.no_sync(), self.autocast():
            yield

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context without autocast, for computations outside of the forward pass."""
        if self.precision not in AUTOCAST:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.partition(":")[0], enabled=False)

    def forward_backward(
        self,
        part: MicroBatch,
        divisor: float | Tensor,
        *,
        last: bool = True,
        on_result: Callable[[MicroBatchResult], bool | None] = lambda _: None,
    ) -> MicroBatchResult:
        """Runs forward and backward of a micro-batch and adds its gradients.

        The sum of losses is divided by `divisor`, usually the number of samples in the update. If `last`, backward also
        averages gradients over processes. `on_result` is called with the result before backward; if it returns False,
        the gradients become NaN on all processes.
        """
        assert self._loss_fn is not None
        with _AS_IT_IS if last else self.network.traits.no_sync():
            inputs, labels, count = self.network.begin(part)
            with self.autocast():
                loss, logits, labels = self._loss_fn(self.network.call(inputs), labels)
            result = MicroBatchResult(loss.detach(), logits.detach(), labels, count)
            bad = on_result(result) is False
            # If processes compute a micro-batch together, an empty share adds to the gradients of other processes.
            weight = self._scale / divisor if part.share.count or self.network.share.together else 0.0
            self._backward(loss, math.nan if bad else weight, last=last)
        return result

    def backward_of(self, loss: Tensor, weight: float | Tensor = 1.0, *, last: bool = True) -> None:
        """Runs backward of a loss [] that the user computed with `network.call`, multiplied by `weight`."""
        with _AS_IT_IS if last else self.network.traits.no_sync():
            self._backward(loss, self._scale * weight, last=last)

    def _backward(self, loss: Tensor, weight: float | Tensor, *, last: bool) -> None:
        if last and self.network.traits.reach_all:
            loss = self.network.traits.reach_all(loss)
        if self.scaler or loss.ndim:
            loss = loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        else:
            # Like loss.backward(weight), without its checks, which import sympy (0.3 s).
            start = weight.to(loss) if isinstance(weight, Tensor) else self._initial_gradient(loss, weight)
            _engine_run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        phases.CLOCK.end_backward()

    def _initial_gradient(self, loss: Tensor, weight: float) -> Tensor:
        """Returns the initial gradient [] of backward, `weight` as a tensor; cached, because weights rarely change."""
        goes_with = weight, loss.dtype, loss.device
        if type(loss) is not Tensor:
            return loss.new_full((), weight)
        if goes_with != self._goes_with or self._begin._version:  # changed in place by the user's code
            self._goes_with, self._begin = goes_with, loss.new_full((), weight)
        return self._begin

    def finish(self) -> None:
        """Finishes the synchronization of gradients after an update's last micro-batch. A collective."""
        before = phases.CLOCK.start_phase(phases.COMMUNICATION)
        self.flat = self.network.finish_gradients()
        phases.CLOCK.start_phase(before)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides gradients by the loss scale. If a gradient overflowed, `step` skips the update on all processes.

        On an accelerator without a loss scale, only sets `spoilt` on the device: 1.0 if a gradient isn't finite.
        """
        if self.scaler:
            self.scaler.unscale_(optimizer)
            found = [*self.scaler._found_inf_per_device(optimizer).values()]
        elif self.skips_on_device(optimizer):
            gradients = [
                one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None
            ]
            found = [_nonfinite_flag(gradients, self.world.device)]
            self.spoilt = found[0]
        else:
            return
        if self.network.share.together and not self.world.alone:
            for one in found or [torch.zeros((), device=self.world.device)]:
                dist.all_reduce(one, dist.ReduceOp.MAX)

    def skips_on_device(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer skips non-finite updates on the device, as torch's fused optimizers can."""
        fused: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
        return self.on_card and fused and not self.scaler

    def finish_statistics(self) -> None:
        """Updates BatchNorm's running statistics. A collective. Precedes `step`, to prevent partial updates."""
        self.network.finish_update()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        elif self.spoilt is not None:
            untyped: Any = optimizer  # as torch's GradScaler sets it
            untyped.grad_scale, untyped.found_inf = None, self.spoilt
            optimizer.step()
            del untyped.grad_scale, untyped.found_inf
        else:
            optimizer.step()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns True if each tensor's sum is finite, which needs a single pass over memory."""
    sums = [tensor.sum() for tensor in tensors]
    if sums and sums[0].device.type != "cpu":  # one synchronization for all tensors
        return bool(torch.stack([torch.isfinite(one) for one in sums]).all())
    return all(map(math.isfinite, sums))


def _nonfinite_flag(gradients: Sequence[Tensor], device: str) -> Tensor:
    """Returns a tensor [] on the device: 1.0 if any gradient has a non-finite value, else 0.0."""
    found, scale = torch.zeros((), device=device), torch.ones((), device=device)
    for kind in {one.dtype for one in gradients}:
        torch._amp_foreach_non_finite_check_and_unscale_([one for one in gradients if one.dtype == kind], found, scale)
    return found


def summed_over_samples(loss: Tensor, count: int) -> Tensor:
    """Returns the sum [] of a loss over `count` samples; `loss` has one value per sample [n, …] or is their mean []."""
    return loss * count if loss.ndim == 0 else loss.reshape(count, -1).mean(1).sum()
