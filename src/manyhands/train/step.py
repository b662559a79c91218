"""One update: forward, backward, average, update. No input or output."""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.utils as nn_utils
from torch import Tensor

from manyhands.config.job import TrainOptions
from manyhands.core.errors import RunError
from manyhands.core.phases import CLOCK, COMPUTE, UPDATE
from manyhands.core.seeds import derive, mix
from manyhands.core.world import World
from manyhands.parallel.gradients import Gradients, MicroBatchResult, all_finite
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.replicas.batch_norm import forget_seen
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.choose_sync import values_by_rank
from manyhands.train.diagnose import HINTS, explain_loss, is_finite, kind_of
from manyhands.train.draws import seed_generators, uses_torch_rng_alone
from manyhands.train.feed import LoadedMicroBatch, StepSums, UpdateShare
from manyhands.train.loss import LossFn, something


@dataclass(frozen=True)
class LeftOutUpdate:
    """An update that all processes skipped because of a non-finite loss or gradient."""

    step: int  # number of the update, from 0, skipped ones included
    what: str  # wasn't finite
    where: str  # the rank, and the samples where they are known
    also: str  # what else that has cost


class PartialUpdate:
    """Tracks the changes of an update, to undo them if it fails in the middle, such as after the loss of a peer.

    BatchNorm statistics and parameters change only at the end; other buffers may change in every forward.

    Attributes:
        begun: an update is in progress.
        in_pieces: the parameters are being changed and are neither old nor new.
    """

    def __init__(self, network: ParallelNetwork) -> None:
        ours = {id(one) for layer in network.norms.layers for one in layer.buffers(recurse=False)}
        # The module and the key of each: modules may replace a buffer instead of writing into it.
        self._places = {
            f"{prefix}.{key}".lstrip("."): (module, key)
            for prefix, module in network.model.named_modules()
            for key, one in module._buffers.items()
            if one is not None and id(one) not in ours
        }
        self._before: dict[str, Tensor] = {}
        self.begun = self.in_pieces = False

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The network's buffers by name, except those of BatchNorm groups and those that a module has removed."""
        places = self._places.items()
        return {name: one for name, (module, key) in places if (one := module._buffers.get(key)) is not None}

    def begin(self) -> None:
        """Stores what an update may change before its end."""
        self.begun, self._before = True, {name: one.clone() for name, one in self.buffers.items()}

    def end(self) -> None:
        """Marks the update as complete."""
        self.begun = self.in_pieces = False

    def undo(self) -> None:
        """Restores what an incomplete update has changed."""
        if self.begun:
            for name, before in self._before.items():
                module, key = self._places[name]
                buffer = module._buffers.get(key)
                if buffer is not None and buffer.shape == before.shape:
                    buffer.copy_(before)
                else:
                    module._buffers[key] = before


class Updater:
    """Runs updates: by a call, or by `begin`, micro-batches of a custom loop (`custom_update.py`) and `finish`.

    Args:
        network: the network under its parallel mode.
        optimizer: the optimizer of the network's parameters.
        loss_fn: the loss as a sum; None if the user computes it.
        options: the train section.
        world: the processes.
        set_rates: sets the learning rates for an update, by its number.
        synchronizer: the sync method, in addition to the parallel mode.
        gradients_mean: False for the sum of all processes' mean gradients.
        unused: names of parameters that got no gradient in the trial step.
    """

    def __init__(  # noqa: PLR0913 - everything that meets in an update
        self,
        network: ParallelNetwork,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn | None,
        options: TrainOptions,
        world: World,
        set_rates: Callable[[int], None],
        *,
        synchronizer: Synchronizer | None = None,
        gradients_mean: bool = True,
        unused: Collection[str] = (),
    ) -> None:
        self.network, self.optimizer, self.loss_fn = network, optimizer, loss_fn
        self.options, self.world, self.set_rates = options, world, set_rates
        self.device = world.device.partition(":")[0]
        self.measured = StepSums()
        self.synchronizer = synchronizer or Synchronizer()
        network.norms.apart = self.synchronizer.local_statistics
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {id(p) for p in self.parameters}
        # Gradients of parameters that the optimizer wasn't given are neither cleared nor unscaled.
        self._others = [p for p in network.model.parameters() if id(p) not in own]
        idle = {id(p) for name, p in network.model.named_parameters() if name in unused}
        self._used = [p for p in self.parameters if id(p) not in idle]
        smoothing, precision = options.label_smoothing, options.precision
        self.gradients = Gradients(
            network, world, loss_fn, smoothing=smoothing, precision=precision, mean=gradients_mean
        )
        self._seed, self._pass_seed = derive(options.seed, "step", world.rank), derive(options.seed, "pass")
        self.partial_update = PartialUpdate(network)
        self._shared_buffers: list[str] = []
        if not world.alone and not self.synchronizer.local_statistics:
            sharing = {name for name, layout in network.layouts.items() if layout.cuts}
            shared = network.model.state_dict().keys() - sharing
            self._shared_buffers = [name for name in self.partial_update.buffers if name in shared]
        self._differing = torch.zeros(len(self._shared_buffers), dtype=torch.int32, device=world.device)
        # Seeding the others' generators costs a small network a fiftieth of its update.
        by_us = loss_fn is not None and not loss_fn.own and type(optimizer).__module__.startswith("manyhands.")
        self._torch_alone = by_us and uses_torch_rng_alone(network.model)
        # Accelerators report later, fp16's scaler has its own rules, and a custom loop may read the gradients.
        self._leaves_out = self.device == "cpu" and loss_fn is not None and self.gradients.scaler is None
        self._bad: LoadedMicroBatch | None = None
        self._mark = self.measured.mark()
        self._in_a_row = 0
        self.left_out: list[LeftOutUpdate] = []  # taken by the caller that reports them

    def __call__(self, update: UpdateShare, step: int) -> None:
        """Makes update number `step`, counted from 0.

        One whose loss or gradients aren't finite is left out by all that would make it with the same gradients.

        Raises:
            RunError: it is one too many in a row (train.stop_after_bad), or not all can hear of it in time; the
                parameters are left as they were before this update.
        """
        self.begin(step)
        self.add_gradients(update, step, before_last=self.synchronizer.before_last_micro_batch)
        self.synchronizer.on_gradients()
        self.finish(update, step)

    def begin(self, step: int) -> None:
        """Prepares update number `step`: random seeds, learning rate, empty gradients."""
        seed_generators(mix(self._seed ^ step), self.device, torch_alone=self._torch_alone)
        self.set_rates(step)
        for parameter in self.parameters:
            parameter.grad = None
        self._bad, self._mark = None, self.measured.mark()
        self.partial_update.begin()
        self.synchronizer.before_update(step)

    def finish(self, update: UpdateShare, step: int) -> None:
        """Updates the parameters from synchronized gradients; raises as a call does."""
        CLOCK.to(UPDATE)
        for parameter in self._used:
            if parameter.grad is None:
                # Of a branch that this update left out: zero, as where another process has taken it.
                parameter.grad = torch.zeros_like(parameter)
        self.gradients.unscale(self.optimizer)
        if not self._check_and_clip(update, step):
            self._leave_out(update, step)
            return
        self._in_a_row = 0
        if self.gradients.spoilt is not None:
            self.measured.first_spoilt = _first(self.measured.first_spoilt, self.gradients.spoilt == 0, step)
        self.gradients.finish_statistics()
        if self._shared_buffers:
            self._share_buffers()
        self.partial_update.in_pieces = True
        self.gradients.step(self.optimizer)
        self.synchronizer.after_update(step + 1)
        self.partial_update.end()
        CLOCK.to(COMPUTE)

    def _share_buffers(self) -> None:
        """Broadcasts rank 0's buffers, as DDP does, since modules may update them from the samples of a process."""
        named = self.partial_update.buffers
        buffers = [named[name] for name in self._shared_buffers]
        mine = [one.reshape(-1).view(torch.uint8) for one in buffers]
        shared = torch.cat(mine)
        dist.broadcast(shared, src=0)
        for number, (own, value) in enumerate(zip(mine, shared.split([len(one) for one in mine]), strict=True)):
            differs = (own != value).any()
            self._differing[number] |= differs
            # Not asked on a card, which would have to finish first. An expanded buffer can't be written to.
            if shared.device.type == "cpu" and not differs:
                continue
            buffers[number].copy_(value.clone().view(buffers[number].dtype).view_as(buffers[number]))

    def differing_buffers(self) -> list[str]:
        """Returns the buffers that processes updated differently before taking rank 0's values; a collective."""
        if self._shared_buffers:
            dist.all_reduce(self._differing, dist.ReduceOp.MAX)
        return [name for name, one in zip(self._shared_buffers, self._differing.tolist(), strict=True) if one]

    def add_gradients(
        self, update: UpdateShare, step: int, *, averages: bool = True, before_last: Callable[[], None] = lambda: None
    ) -> None:
        """Accumulates the gradients of all micro-batches; the mode averages them over processes in the last one."""
        assert self.loss_fn is not None
        last, whole = len(update.micro_batches) - 1, self._divisor(update, self.loss_fn)
        # The reported loss is a mean over samples; with unequal weights, the weighted mean of the full batch.
        shown = None if self.loss_fn.weigh is None else update.count / whole
        for number, part in enumerate(update.micro_batches):
            if number == last:
                before_last()
            micro_batch = part.micro_batch(update.count, self.pass_seed(step, number))
            on_result = functools.partial(self._measure, part, step, shown)
            self.gradients.forward_backward(micro_batch, whole, last=averages and number == last, on_result=on_result)
        if averages:
            self.gradients.finish()

    def pass_seed(self, step: int, number: int) -> int:
        """Returns the random seed for an update's micro-batch that processes compute together."""
        return mix(self._pass_seed ^ (step << 8) ^ number)

    def _divisor(self, update: UpdateShare, loss_fn: LossFn) -> float | Tensor:
        """What the whole batch's sum of losses is divided by; a collective where samples count unequally."""
        weigh = loss_fn.weigh
        if loss_fn.is_sum or weigh is None:
            return 1.0 if loss_fn.is_sum else float(update.count)
        mine = torch.stack([weigh(part.batch.labels[: part.share.count]) for part in update.micro_batches]).sum()
        alike = self.world.size // self.network.share.parts
        return something(self.synchronizer.added_up(mine, self.world) / alike)

    def _measure(
        self, part: LoadedMicroBatch, step: int, shown: float | Tensor | None, found: MicroBatchResult
    ) -> bool:
        """Returns False if the loss is not finite; NaN gradients then inform the other processes."""
        if found.count:
            self.note(part, step, found.loss if shown is None else found.loss * shown, found.count)
            rows = found.logits.size(0)
            alike = rows == found.labels.size(0)
            self.measured.guess(found.logits, found.labels if alike else found.labels[:rows])
        return self._bad is None

    def note(self, part: LoadedMicroBatch, step: int, loss: Tensor, count: int) -> None:
        """Adds the sum [] of losses of `count` samples to the measurements.

        Raises:
            RunError: it is not finite, and the update can't be skipped; on accelerators the status round raises.
        """
        measured = self.measured
        if self.device == "cpu":
            value = loss.item()
            if not math.isfinite(value):
                if not self._leaves_out:
                    raise explain_loss(self.network, part, self.world, step)
                self._bad = self._bad or part
                return
            measured.loss += value
        else:
            measured.loss = measured.loss + loss
            measured.first_bad = _first(measured.first_bad, torch.isfinite(loss), step)
        measured.samples += count

    def _check_and_clip(self, update: UpdateShare, step: int) -> bool:
        """Clips by the whole network's norm; False where a gradient isn't finite and the update is to be left out."""
        checked = self.gradients.scaler is None and self.gradients.spoilt is None
        # Split networks: local shards are checked before the collective norm. FSDP: only the norm is checked.
        asked, together = self.options.clip or self.network.traits.sharded, self.network.share.together
        if checked and (together or not asked) and not self._is_well(self._finite(), update, step):
            return False
        if not asked:
            return True
        others = [(one, one.grad) for one in self._others if one.grad is not None]
        for parameter, _ in others:
            parameter.grad = None
        norm = self.network.gradient_norm()
        for parameter, gradient in others:
            parameter.grad = gradient
        if checked and not together and not self._is_well(math.isfinite(norm.item()), update, step):
            return False
        if self.options.clip:
            nn_utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)
        return True

    def _is_well(self, finite: bool, update: UpdateShare, step: int) -> bool:
        """Returns True if the update is valid; raises if it is invalid and can't be skipped on all processes."""
        if not self._leaves_out:
            if not finite:
                raise explain_gradient(self, update, step, alone=self.network.share.together or self.loss_fn is None)
        elif finite and self._bad:  # what isn't finite has not come through to the gradients
            raise explain_loss(self.network, self._bad, self.world, step)
        return finite

    def _leave_out(self, update: UpdateShare, step: int) -> None:
        """Undoes this update except for its number; a collective of the processes that share gradients."""
        self._in_a_row += 1
        last = self._in_a_row if self._in_a_row >= self.options.stop_after_bad else 0
        error = explain_left_out(self, self._bad, update, step, closely=bool(last))
        if last:
            row = f"; the last {last} updates were skipped" if last > 1 else ""
            raise RunError(f"{error.message}{row}", error.where, error.hints)
        self.measured.back(self._mark)
        forget_seen(self.network.model)
        self.partial_update.undo()
        self.partial_update.end()
        also = self.synchronizer.forget()
        self.left_out.append(LeftOutUpdate(step, error.message, error.where, also))
        self.synchronizer.after_update(step + 1)
        CLOCK.to(COMPUTE)

    def _finite(self) -> bool:
        """Whether all gradients are: a glance at flat ones is enough, unless a loop of the user's may replace them."""
        flat = self.gradients.flat if self.loss_fn else []
        finite = bool(flat) and all_finite(flat)
        finite = finite or all_finite([one.grad for one in self.parameters if one.grad is not None])
        if self.network.share.together and self._leaves_out and not self.world.alone:
            finite_everywhere = torch.tensor(float(finite))
            dist.all_reduce(finite_everywhere, dist.ReduceOp.MIN)
            return bool(finite_everywhere)
        return finite


def _first(so_far: Tensor | float, good: Tensor, step: int) -> Tensor:
    """The first step [] that wasn't good, on the device; infinite while all were."""
    bad = torch.where(good, math.inf, float(step))
    return torch.minimum(bad, so_far if isinstance(so_far, Tensor) else torch.full_like(bad, so_far))


def explain_left_out(
    updater: Updater, bad: LoadedMicroBatch | None, update: UpdateShare, step: int, *, closely: bool
) -> RunError:
    """Returns the error for a non-finite loss or gradient in an update; a collective of those that share gradients.

    Args:
        updater: has complete gradients.
        bad: this process's micro-batch with a non-finite loss.
        update: this process's share of the update.
        step: the number of the update.
        closely: find the first non-finite tensor, which runs the network once more.
    """
    network, world = updater.network, updater.world
    mine = None
    if bad:
        found = explain_loss(network, bad, world, step, closely=closely)
        mine = [found.message, found.where, list(found.hints)]
    losses = [said for said in values_by_rank(updater.synchronizer, mine, world).values() if said]
    if losses:
        what, where, hints = losses[0]
        return RunError(what, where, tuple(hints))
    if network.traits.sharded and not closely:  # torch would add what is computed once more to the next update
        return RunError("a gradient is not finite", f"step {step}", HINTS)
    return explain_gradient(updater, update, step)


def explain_gradient(updater: Updater, update: UpdateShare, step: int, *, alone: bool = False) -> RunError:
    """Returns the error for a non-finite gradient; all processes that share gradients call it.

    `alone`: only this process calls it, because the other processes may not have that parameter.
    """
    if updater.loss_fn and not updater.network.share.together:
        updater.optimizer.zero_grad(set_to_none=True)
        updater.add_gradients(update, step, averages=False)
    found = ((name, one.grad) for name, one in updater.network.model.named_parameters())
    mine = next((f"the gradient of {n} is {kind_of(g)}" for n, g in found if g is not None and not is_finite(g)), "")
    everybody: dict[int, str] = {updater.world.rank: mine}
    if not alone:
        everybody = values_by_rank(updater.synchronizer, mine, updater.world)
    rank = next((rank for rank, text in everybody.items() if text), min(everybody))
    what = everybody[rank] or "a gradient is not finite after the all-reduce"
    return RunError(what, f"rank {rank}, step {step}", HINTS)
