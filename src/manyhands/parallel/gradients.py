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
    kind = AUTOCAST.get(precision)
    return torch.autocast(device.partition(":")[0], dtype=kind) if kind else _NO_CONTEXT


@dataclass(slots=True)  # not frozen: creation would take three times as long
class MicroBatchResult:
    """Loss, logits and labels of a micro-batch, after its forward pass."""

    loss: Tensor  # sum [] of this process's losses
    logits: Tensor  # [n, C]
    labels: Tensor  # int64 [n]
    count: int  # samples that this process reports; 0 if another process reports them


_NO_CONTEXT = contextlib.nullcontext()  # shared, to avoid creating one in every update


class Gradients:
    """Accumulates the gradients of a network over the micro-batches of an update.

    `loss_fn` is the loss of `forward_backward`; None: the caller uses `backward_custom_loss`. `smoothing` of labels is
    for sharded classes. With precision "fp16", the loss is scaled. If `mean` is False, gradients are summed.
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
        self.skipped: Tensor | None = None  # 1.0 [] if the accelerator skipped the last update; see `unscale`
        self._begin, self._goes_with = torch.ones(()), (1.0, torch.float32, torch.device("cpu"))
        self._loss_fn = network.loss_fn(loss_fn, smoothing) if loss_fn else None
        self._scale = network.traits.gradient_scale * (1 if mean else network.share.parts)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return autocast(self.precision, self.world.device)

    @contextlib.contextmanager
    def custom_forward_context(self, *, last: bool) -> Iterator[None]:
        """Context of a custom forward and backward pass. `last` is True for the update's last micro-batch."""
        with _NO_CONTEXT if last else self.network.traits.no_sync(), self.autocast():
            yield

    def without_autocast(self) -> contextlib.AbstractContextManager[object]:
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
        """Runs the forward and backward pass of a micro-batch and accumulates its gradients.

        The summed loss is divided by `divisor`, usually the number of samples in the update. In the update's `last`
        micro-batch, backward also averages gradients over processes. `on_result` is called before backward; if it
        returns False, the gradients become NaN on all processes.
        """
        assert self._loss_fn is not None
        with _NO_CONTEXT if last else self.network.traits.no_sync():
            inputs, labels, count = self.network.begin(part)
            with self.autocast():
                loss, logits, labels = self._loss_fn(self.network.call(inputs), labels)
            result = MicroBatchResult(loss.detach(), logits.detach(), labels, count)
            bad = on_result(result) is False
            # If processes compute a micro-batch together, an empty share adds to the gradients of other processes.
            weight = self._scale / divisor if part.share.count or self.network.share.together else 0.0
            self._backward(loss, math.nan if bad else weight, last=last)
        return result

    def backward_custom_loss(self, loss: Tensor, weight: float | Tensor = 1.0, *, last: bool = True) -> None:
        """Runs backward of `weight` times a scalar loss that the caller computed with `network.call`."""
        with _NO_CONTEXT if last else self.network.traits.no_sync():
            self._backward(loss, self._scale * weight, last=last)

    def _backward(self, loss: Tensor, weight: float | Tensor, *, last: bool) -> None:
        if last and self.network.traits.connect_loss:
            loss = self.network.traits.connect_loss(loss)
        if self.scaler or loss.ndim:
            loss = loss * (weight.to(loss.dtype) if isinstance(weight, Tensor) else weight)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        else:
            # Like loss.backward(weight), without its checks, which import sympy (0.3 s).
            start = weight.to(loss) if isinstance(weight, Tensor) else self._initial_gradient(loss, weight)
            _engine_run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        phases.CLOCK.end_backward()

    def _initial_gradient(self, loss: Tensor, weight: float) -> Tensor:
        goes_with = weight, loss.dtype, loss.device
        if type(loss) is not Tensor:
            return loss.new_full((), weight)
        if goes_with != self._goes_with or self._begin._version:  # changed in place by the user's code
            self._goes_with, self._begin = goes_with, loss.new_full((), weight)
        return self._begin

    def finish(self) -> None:
        """Waits until the gradients of the update are synchronized. A collective, called after the last micro-batch."""
        before = phases.CLOCK.start_phase(phases.COMMUNICATION)
        self.flat = self.network.finish_gradients()
        phases.CLOCK.start_phase(before)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the loss scale of fp16, and has `step` skip the update if a gradient is not finite.

        Without a loss scale, gradients stay unchanged. Then `step` can only skip an update on an accelerator whose
        optimizer supports it, and `skipped` becomes 1.0 (a scalar tensor on the device) if a gradient is not finite.
        """
        if self.scaler:
            self.scaler.unscale_(optimizer)
            found = [*self.scaler._found_inf_per_device(optimizer).values()]
        elif self.optimizer_skips_nonfinite(optimizer):
            gradients = [
                one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None
            ]
            found = [_nonfinite_flag(gradients, self.world.device)]
            self.skipped = found[0]
        else:
            return
        if self.network.share.together and not self.world.alone:
            for one in found or [torch.zeros((), device=self.world.device)]:
                dist.all_reduce(one, dist.ReduceOp.MAX)

    def optimizer_skips_nonfinite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer itself skips non-finite updates on the accelerator, as fused optimizers can."""
        fused: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
        return self.on_card and fused and not self.scaler

    def update_running_statistics(self) -> None:
        """Updates BatchNorm's running statistics. A collective, called before `step` to prevent partial updates."""
        self.network.finish_update()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        elif self.skipped is not None:
            untyped: Any = optimizer  # as torch's GradScaler sets it
            untyped.grad_scale, untyped.found_inf = None, self.skipped
            optimizer.step()
            del untyped.grad_scale, untyped.found_inf
        else:
            optimizer.step()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns True if the sum of each tensor is finite; a sum reads the tensor only once."""
    sums = [tensor.sum() for tensor in tensors]
    if sums and sums[0].device.type != "cpu":  # one synchronization for all tensors
        return bool(torch.stack([torch.isfinite(one) for one in sums]).all())
    return all(map(math.isfinite, sums))


def _nonfinite_flag(gradients: Sequence[Tensor], device: str) -> Tensor:
    """Returns a scalar tensor on `device`: 1.0 if a gradient has an infinite or NaN value, otherwise 0.0."""
    found, scale = torch.zeros((), device=device), torch.ones((), device=device)
    for kind in {one.dtype for one in gradients}:
        torch._amp_foreach_non_finite_check_and_unscale_([one for one in gradients if one.dtype == kind], found, scale)
    return found


def sum_over_samples(loss: Tensor, count: int) -> Tensor:
    """Returns the loss summed over `count` samples. `loss`: their mean [], or the loss of each sample [n, …]."""
    return loss * count if loss.ndim == 0 else loss.reshape(count, -1).mean(1).sum()
