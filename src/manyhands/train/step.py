"""One update: forward, backward, agree, update. No input or output."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.utils as nn_utils
from torch import Tensor
from torch.distributed.tensor import DTensor

from manyhands.config.job import TrainOptions
from manyhands.core.seeds import derive, mix
from manyhands.core.world import World
from manyhands.parallel.network import Cutting, Judge, ParallelNetwork
from manyhands.parallel.norm import NormGroups
from manyhands.parallel.reduce import total_norm
from manyhands.train.agreeing import Agreeing
from manyhands.train.criterion import Criterion
from manyhands.train.diagnose import explain_gradient, explain_loss, explain_piece
from manyhands.train.draws import seed_generators
from manyhands.train.feed import Pass, Update
from manyhands.train.optimize import learning_rate, set_learning_rate

COUNTED_AT_ONCE = 1 << 16  # logits
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Measured:
    """Sums over this process's samples since the last `take`; tensors on the device, so that nothing waits for it.

    Attributes:
        loss: sum of losses.
        samples: samples that count.
        first_bad: first step whose loss was not finite, infinite if there is none; kept for good.
    """

    loss: Tensor | float = 0.0
    samples: int = 0
    first_bad: Tensor | float = math.inf
    _correct: int | Tensor = 0
    _guesses: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def guess(self, logits: Tensor, labels: Tensor) -> None:
        """Notes logits [n, C] and labels int64 [n]; small ones are counted many passes at once, which costs less."""
        self._guesses.append((logits, labels))
        if len(self._guesses) * logits.numel() >= COUNTED_AT_ONCE:
            self._count()

    def take(self) -> tuple[float, int, int]:
        """Loss sum, correct and counted samples; starts again from zero."""
        self._count()
        values = float(self.loss), int(self._correct), self.samples
        self.loss, self._correct, self.samples = 0.0, 0, 0
        return values

    def _count(self) -> None:
        if self._guesses:
            logits, labels = (torch.cat(tensors) for tensors in zip(*self._guesses, strict=True))
            self._correct = self._correct + (logits.argmax(1) == labels).sum()
            self._guesses.clear()


class Updater:
    """Makes updates.

    Args:
        network: under its parallel mode.
        norm: what its BatchNorm layers must know of each pass.
        optimizer: of the network's parameters.
        criterion: the loss as a sum.
        options: the train section.
        world: who takes part.
        steps_per_epoch: for the learning rate.
        agreeing: how processes agree beside what the mode does.
        gradients_mean: False for the sum of all processes' mean gradients.
        unused: names of parameters that got no gradient when the network was tried.
    """

    def __init__(  # noqa: PLR0913 - everything that meets in an update
        self,
        network: ParallelNetwork,
        norm: NormGroups,
        optimizer: torch.optim.Optimizer,
        criterion: Criterion,
        options: TrainOptions,
        world: World,
        steps_per_epoch: int,
        *,
        agreeing: Agreeing | None = None,
        gradients_mean: bool = True,
        unused: Collection[str] = (),
    ) -> None:
        self.network, self.norm, self.optimizer, self.criterion = network, norm, optimizer, criterion
        self.options, self.world, self.steps_per_epoch = options, world, steps_per_epoch
        self.device = world.device.partition(":")[0]
        self.scaler = torch.amp.GradScaler(self.device) if options.precision == "fp16" else None
        self.measured = Measured()
        self.agreeing = agreeing or Agreeing()
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        idle = {id(p) for name, p in network.inner.named_parameters() if name in unused}
        self._used = [p for p in self.parameters if id(p) not in idle]
        self.cutting = network.cutting
        self.judge = _judge(network, criterion, options.label_smoothing)
        self._scale = network.gradient_scale * (1 if gradients_mean else network.replicas(world.size))
        self._seed, self._pass_seed = derive(options.seed, "step", world.rank), derive(options.seed, "pass")

    def __call__(self, update: Update, step: int) -> None:
        """Makes update number `step`, counted from 0.

        Raises:
            RunError: a loss or gradient is not finite; the parameters are left as they were before this update.
        """
        seed_generators(mix(self._seed ^ step), self.device)
        set_learning_rate(self.optimizer, learning_rate(self.options, step, self.steps_per_epoch))
        for parameter in self.parameters:
            parameter.grad = None
        self.agreeing.before_update(step)
        self.gradients(update, step, before_last=self.agreeing.before_last_pass)
        self.agreeing.on_gradients()
        for parameter in self._used:
            if parameter.grad is None:
                # Of a branch that this update left out: zero, as where another process has taken it.
                parameter.grad = torch.zeros_like(parameter)
        if self.scaler:
            if self.cutting and not self.world.alone:
                self._spread_overflow()
            self.scaler.unscale_(self.optimizer)
        self._check_and_clip(update, step)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.cutting:
            self.cutting.finish_update()
        else:
            self.norm.finish_update(1 if self.agreeing.own_statistics else self.world.size)
        self.agreeing.after_update(step + 1)

    def gradients(
        self, update: Update, step: int, *, agree: bool = True, before_last: Callable[[], None] = lambda: None
    ) -> None:
        """Adds up the gradients of all passes; processes agree on them in the last one, by what the mode does."""
        last = len(update.passes) - 1
        for number, part in enumerate(update.passes):
            held_back = number < last or not agree
            if number == last:
                before_last()
            with self.network.hold_back() if held_back else contextlib.nullcontext():
                loss, weight = self._forward(part, update.count, mix(self._pass_seed ^ (step << 8) ^ number), step)
                self._backward(loss if held_back else self.network.reach_all(loss), weight)
        if self.cutting and agree:
            self.cutting.finish_backward()

    def _forward(self, part: Pass, count: int, seed: int, step: int) -> tuple[Tensor, float]:
        """The pass's sum of losses [], and what its gradients are multiplied by."""
        share, images, labels = part.share, part.batch.images, part.batch.labels
        if self.cutting:
            # What others hold of the same samples must fit, so a share of no samples is empty here.
            images, labels = images[: share.count], labels[: share.count]
            self.cutting.begin_pass(part.shape(count, seed))
        elif self.agreeing.own_statistics:
            self.norm.begin_pass((), (), share.count, count)
        else:
            self.norm.begin_pass(share.spans, share.shared_groups, share.count, count)
        with self.autocast():
            loss, logits, labels = self.judge(self.network.call(images), labels)
        if self.cutting.counts and len(labels) if self.cutting else share.count:
            self._measure(loss.detach(), (logits.detach(), labels), part, step)
        return loss, self._scale / count if share.count or self.cutting else 0.0

    def _backward(self, loss: Tensor, weight: float) -> None:
        if self.scaler:
            self.scaler.scale(loss * weight).backward()
        else:
            loss.backward(torch.full_like(loss, weight))  # as (loss * weight).backward(), two operations less

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The forward pass's precision."""
        kind = AUTOCAST.get(self.options.precision)
        return torch.autocast(self.device, dtype=kind) if kind else contextlib.nullcontext()

    def _measure(self, loss: Tensor, guesses: tuple[Tensor, Tensor], part: Pass, step: int) -> None:
        measured = self.measured
        if self.device == "cpu":
            value = loss.item()
            if not math.isfinite(value):
                raise explain_loss(self.network, part, self.world, step)
            measured.loss += value
        else:
            measured.loss = measured.loss + loss
            bad = torch.where(torch.isfinite(loss), math.inf, float(step))
            measured.first_bad = torch.minimum(torch.as_tensor(measured.first_bad, device=bad.device), bad)
        logits, labels = guesses
        measured.guess(logits, labels[: len(logits)])
        measured.samples += part.share.count if not self.cutting else len(labels)

    def _check_and_clip(self, update: Update, step: int) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.cutting:
            self._check_and_clip_pieces(gradients, self.cutting, step)
            return
        if not self.options.clip and not self.network.sharded:
            if self.device == "cpu" and not self.scaler and not all_finite(gradients):
                raise explain_gradient(self, update, step)
            return
        norm = nn_utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.device == "cpu" and not self.scaler and not math.isfinite(norm.item()):
            raise explain_gradient(self, update, step)
        if self.options.clip:
            nn_utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)

    def _check_and_clip_pieces(self, gradients: list[Tensor], cutting: Cutting, step: int) -> None:
        if self.device == "cpu" and not self.scaler and not all_finite(gradients):
            raise explain_piece(self.network.inner, self.world, step)
        if self.options.clip:
            norm = total_norm(dict(self.network.inner.named_parameters()), cutting.layouts, cutting.grid)
            nn_utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)

    def _spread_overflow(self) -> None:
        """Has the loss scaler skip an update on all processes when one piece's gradient overflowed."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        bad = torch.tensor(float(not all_finite(gradients)), device=self.world.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            gradients[0].fill_(math.inf)


def _judge(network: ParallelNetwork, criterion: Criterion, smoothing: float) -> Judge:
    """The criterion for what the network gives under its mode."""
    if network.cutting:
        return network.cutting.judge(criterion, smoothing)

    def judge(output: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *criterion(output, labels), labels

    return judge


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Says by one sum over each tensor whether all values are finite: no NaN or infinity leaves a sum finite.

    The cheapest pass there is over memory, several times as fast as a norm or isfinite on a CPU.
    """
    return all(math.isfinite(tensor.sum().item()) for tensor in tensors)
