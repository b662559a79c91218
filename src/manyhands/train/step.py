"""One update: forward, backward, averaging, optimizer step. Reads and writes no files."""

import functools
import math
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
import torch.nn.utils as nn_utils
from torch import Tensor

from manyhands.core.errors import RunError
from manyhands.core.phases import CLOCK, COMPUTE, UPDATE
from manyhands.core.seeds import derive_seed, mix
from manyhands.parallel.gradients import Gradients, MicroBatchResult, all_finite
from manyhands.parallel.network import MicroBatch, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import discard_accumulated
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.choose_sync import values_by_rank
from manyhands.train.feed import StepSums, UpdateShare, seed_generators, uses_torch_rng_alone
from manyhands.train.journal import RunContext
from manyhands.train.loss import LossFn, as_divisor
from manyhands.train.status import FIRST_HINTS, HINTS, explain_loss, is_finite, value_kind


class PartialUpdate:
    """Copies the buffers that an update changes, to undo an update that fails, for example after losing a peer.

    BatchNorm statistics and parameters change only at the end; other buffers may change in every forward pass. While
    `in_pieces` is True, some parameters may be updated and others not.
    """

    def __init__(self, network: ParallelNetwork) -> None:
        grouped = {id(one) for layer in network.norms.layers for one in layer.buffers(recurse=False)}
        # Module and key of each buffer, because modules may replace a buffer instead of writing into it.
        self._places = {
            f"{prefix}.{key}".lstrip("."): (module, key)
            for prefix, module in network.model.named_modules()
            for key, one in module._buffers.items()
            if one is not None and id(one) not in grouped
        }
        self._before: dict[str, Tensor] = {}
        self.begun = self.in_pieces = False

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The network's buffers by name, except those of BatchNorm groups and those that a module has removed."""
        places = self._places.items()
        return {name: one for name, (module, key) in places if (one := module._buffers.get(key)) is not None}

    def begin(self) -> None:
        self.begun, self._before = True, {name: one.clone() for name, one in self.buffers.items()}

    def end(self) -> None:
        self.begun = self.in_pieces = False

    def undo(self) -> None:
        if self.begun:
            for name, before in self._before.items():
                module, key = self._places[name]
                buffer = module._buffers.get(key)
                if buffer is not None and buffer.shape == before.shape:
                    buffer.copy_(before)
                else:
                    module._buffers[key] = before


class Updater:
    """Runs updates: with a call or, for a custom loop (`custom_update.py`), with `begin` and `finish`.

    `loss_fn` is None if the user computes the loss. `set_rates(step)` sets the learning rates of an update. `unused`
    are the names of parameters that got no gradient in the trial step.

    A non-finite loss or gradient is handled in one of three ways. On a CPU with the job's loss and without fp16, all
    processes with the same gradients skip the update. With fp16, or with a fused optimizer on an accelerator, the loss
    scaler or the optimizer skips the update, and the next status round raises RunError, unless only an fp16 gradient
    overflowed. Otherwise, the update itself raises RunError.
    """

    def __init__(
        self,
        run: RunContext,
        network: ParallelNetwork,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn | None,
        set_rates: Callable[[int], None],
        *,
        synchronizer: Synchronizer | None = None,
        unused: Collection[str] = (),
    ) -> None:
        options, world = run.job.train, run.world
        self.network, self.optimizer, self.loss_fn = network, optimizer, loss_fn
        self.options, self.world, self.set_rates = options, world, set_rates
        self.device = world.device.partition(":")[0]
        self.measured = StepSums()
        self.synchronizer = synchronizer or Synchronizer()
        network.norms.local_only = self.synchronizer.local_statistics
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimized = {id(p) for p in self.parameters}
        # Gradients of parameters that the optimizer wasn't given are neither cleared nor unscaled.
        self._others = [p for p in network.model.parameters() if id(p) not in optimized]
        idle = {id(p) for name, p in network.model.named_parameters() if name in unused}
        self._used = [p for p in self.parameters if id(p) not in idle]
        self.gradients = Gradients(
            *(network, world, loss_fn),
            smoothing=options.label_smoothing,
            precision=options.precision,
            mean=run.job.parallel.gradients_mean,
        )
        self._seed, self._pass_seed = derive_seed(options.seed, "step", world.rank), derive_seed(options.seed, "pass")
        self.partial_update = PartialUpdate(network)
        self._shared_buffers: list[str] = []
        if not world.alone and not self.synchronizer.local_statistics:
            sharing = {name for name, layout in network.layouts.items() if layout.cuts}
            shared = network.model.state_dict().keys() - sharing
            self._shared_buffers = [name for name in self.partial_update.buffers if name in shared]
        self._differing = torch.zeros(len(self._shared_buffers), dtype=torch.int32, device=world.device)
        by_us = loss_fn is not None and not loss_fn.custom and type(optimizer).__module__.startswith("manyhands.")
        self._torch_alone = by_us and uses_torch_rng_alone(network.model)
        # Accelerators report later, fp16's scaler has its own rules, and a custom loop may read the gradients.
        self._leaves_out = self.device == "cpu" and loss_fn is not None and self.gradients.scaler is None
        self.bad: MicroBatch | None = None  # the first micro-batch with a non-finite loss
        self._mark = self.measured.copy_sums()
        self._in_a_row = 0
        self.skipped: list[str] = []  # messages about skipped updates, taken by the caller that reports them

    def __call__(self, update: UpdateShare, step: int) -> None:
        """Runs update `step`, counted from 0. A collective.

        Calls the synchronizer's `before_update` (which may start an exchange), `before_last_micro_batch`,
        `on_gradients` and `after_update`, in this order; the last two may be collectives. Raises RunError if an update
        can't be skipped, or after train.stop_after_bad skipped updates in a row; the parameters are then those before
        this update.
        """
        self.begin(step)
        self.add_gradients(update, step)
        self.synchronizer.on_gradients()
        self.finish(update, step)

    def begin(self, step: int) -> None:
        seed_generators(mix(self._seed ^ step), self.device, torch_alone=self._torch_alone)
        self.set_rates(step)
        for parameter in self.parameters:
            parameter.grad = None
        self.bad, self._mark = None, self.measured.copy_sums()
        self.partial_update.begin()
        self.synchronizer.before_update(step)

    def finish(self, update: UpdateShare, step: int) -> None:
        """Updates the parameters from the complete gradients. A collective. Raises RunError as `__call__` does."""
        CLOCK.start_phase(UPDATE)
        for parameter in self._used:
            if parameter.grad is None and parameter.requires_grad:  # weight decay would move a frozen one
                # The gradient of an unused branch is zero, as DDP has it if another process used the branch.
                parameter.grad = torch.zeros_like(parameter)
        self.gradients.unscale(self.optimizer)
        if not self._check_and_clip(update, step):
            self._skip_update(update, step)
            return
        self._in_a_row = 0
        if (skipped := self.gradients.skipped) is not None:
            self.measured.bad_gradient_step = _first_bad_step(self.measured.bad_gradient_step, skipped == 0, step)
        if self._shared_buffers:
            self._share_buffers()  # before BatchNorm's statistics, since only these buffers can be restored
        self.gradients.update_running_statistics()
        self.partial_update.in_pieces = True
        self.gradients.step(self.optimizer)
        self.synchronizer.after_update(step + 1)
        self.partial_update.end()
        CLOCK.start_phase(COMPUTE)

    def _share_buffers(self) -> None:
        """Broadcasts rank 0's buffers, as DDP does, because modules may update them from local data. A collective."""
        named = self.partial_update.buffers
        buffers = [named[name] for name in self._shared_buffers]
        before = [one.reshape(-1).view(torch.uint8) for one in buffers]
        shared = torch.cat(before)
        dist.broadcast(shared, src=0)
        for number, (bits, value) in enumerate(zip(before, shared.split([len(one) for one in before]), strict=True)):
            differs = (bits != value).any()
            self._differing[number] |= differs
            # On an accelerator, reading `differs` would wait for the device. An expanded buffer can't be written to.
            if shared.device.type == "cpu" and not differs:
                continue
            buffers[number].copy_(value.clone().view(buffers[number].dtype).view_as(buffers[number]))

    def differing_buffers(self) -> list[str]:
        """Returns the names of buffers that differed between processes before rank 0's broadcast. A collective."""
        if self._shared_buffers:
            dist.all_reduce(self._differing, dist.ReduceOp.MAX)
        return [name for name, one in zip(self._shared_buffers, self._differing.tolist(), strict=True) if one]

    def add_gradients(self, update: UpdateShare, step: int, *, averages: bool = True) -> None:
        """Computes the gradients of all micro-batches. With `averages`, also averages them over processes."""
        assert self.loss_fn is not None
        divisor = self._divisor(update, self.loss_fn)
        # The reported loss is a mean over samples; with unequal weights, the weighted mean of the full batch.
        scale = None if self.loss_fn.sum_weights is None else update[0].shape.batch / divisor
        for number, part in enumerate(update):
            last = averages and number == len(update) - 1
            if last:
                self.synchronizer.before_last_micro_batch()
            part.shape.seed = self.micro_batch_seed(step, number)
            on_result = functools.partial(self._record_pass, part, step, scale)
            self.gradients.forward_backward(part, divisor, last=last, on_result=on_result)
        if averages:
            self.gradients.finish()

    def micro_batch_seed(self, step: int, number: int) -> int:
        """Returns the random seed of micro-batch `number` of an update, the same on all processes."""
        return mix(self._pass_seed ^ (step << 8) ^ number)

    def _divisor(self, update: UpdateShare, loss_fn: LossFn) -> float | Tensor:
        """Returns the divisor of the global batch's sum of losses. A collective if samples have weights."""
        weigh = loss_fn.sum_weights
        if loss_fn.is_sum or weigh is None:
            return 1.0 if loss_fn.is_sum else float(update[0].shape.batch)
        mine = torch.stack([weigh(part.labels[: part.share.count]) for part in update]).sum()
        copies = self.world.size // self.network.share.parts
        return as_divisor(self.synchronizer.replica_sum(mine, self.world) / copies)

    def _record_pass(self, part: MicroBatch, step: int, scale: float | Tensor | None, found: MicroBatchResult) -> bool:
        """Records loss and predictions of a micro-batch. Returns False after a loss that isn't finite, on a CPU."""
        if found.count:
            self.record_loss(part, step, found.loss if scale is None else found.loss * scale, found.count)
            rows, labels = found.logits.size(0), found.labels
            self.measured.add_predictions(found.logits, labels if rows == labels.size(0) else labels[:rows])
        return self.bad is None

    def record_loss(self, part: MicroBatch, step: int, loss: Tensor, count: int) -> None:
        """Records the sum [] of losses of `count` samples. On a CPU, raises RunError if not finite, unless skipped."""
        measured = self.measured
        if self.device == "cpu":
            value = loss.item()
            if not math.isfinite(value):
                if not self._leaves_out:
                    raise explain_loss(self.network, part, self.world, step)
                self.bad = self.bad or part
                return
            measured.loss += value
        else:
            measured.loss = measured.loss + loss
            measured.bad_loss_step = _first_bad_step(measured.bad_loss_step, torch.isfinite(loss), step)
        measured.samples += count

    def _check_and_clip(self, update: UpdateShare, step: int) -> bool:
        """Clips by the global gradient norm. Returns False if a gradient isn't finite, so the update is skipped."""
        checked = self.gradients.scaler is None and self.gradients.skipped is None
        # Sharded by a plan: local shards are checked before the collective norm. FSDP: only the norm is checked.
        asked, together = self.options.clip or self.network.traits.sharded, self.network.share.together
        if checked and (together or not asked) and not self._check_finite(self._all_finite(), update, step):
            return False
        if not asked:
            return True
        others = [(one, one.grad) for one in self._others if one.grad is not None]
        for parameter, _ in others:
            parameter.grad = None
        norm = self.network.gradient_norm()
        for parameter, gradient in others:
            parameter.grad = gradient
        if checked and not together and not self._check_finite(math.isfinite(norm.item()), update, step):
            return False
        if self.options.clip:
            nn_utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)
        return True

    def _check_finite(self, finite: bool, update: UpdateShare, step: int) -> bool:
        """Returns `finite`. Raises RunError if a value isn't finite and some process can't skip the update."""
        if not self._leaves_out:
            if not finite:
                raise explain_gradient(self, update, step, alone=self.network.share.together or self.loss_fn is None)
        elif finite and self.bad:  # the gradients are finite, so other processes can't skip the update
            raise explain_loss(self.network, self.bad, self.world, step)
        return finite

    def _skip_update(self, update: UpdateShare, step: int) -> None:
        """Skips this update, which still counts as a step. A collective of the processes with the same gradients."""
        self._in_a_row += 1
        last = self._in_a_row if self._in_a_row >= self.options.stop_after_bad else 0
        error = explain_skipped(self, update, step, closely=bool(last))
        if last:
            row = f"; the last {last} updates were skipped" if last > 1 else ""
            hints = FIRST_HINTS if error.hints == HINTS and step < last else error.hints
            raise RunError(f"{error.message}{row}", error.where, hints)
        self.measured.restore_sums(self._mark)
        discard_accumulated(self.network.model)
        self.partial_update.undo()
        self.partial_update.end()
        also = self.synchronizer.clear_residuals()
        cost = f" ({also})" if also else ""
        self.skipped.append(f"the update after step {step} is skipped: {error.message} ({error.where}){cost}")
        self.synchronizer.after_update(step + 1)
        CLOCK.start_phase(COMPUTE)

    def _all_finite(self) -> bool:
        """Returns True if all gradients are finite. A collective on a mesh."""
        flat = self.gradients.flat if self.loss_fn else []
        finite = bool(flat) and all_finite(flat)
        finite = finite or all_finite([one.grad for one in self.parameters if one.grad is not None])
        if self.network.share.together and self._leaves_out and not self.world.alone:
            finite_everywhere = torch.tensor(float(finite))
            dist.all_reduce(finite_everywhere, dist.ReduceOp.MIN)
            return bool(finite_everywhere)
        return finite


def _first_bad_step(so_far: Tensor | float, good: Tensor, step: int) -> Tensor:
    """Returns the smaller of `so_far` and, if not `good`, `step`, as a tensor [] on the device."""
    bad = torch.where(good, math.inf, float(step))
    return torch.minimum(bad, so_far if isinstance(so_far, Tensor) else torch.full_like(bad, so_far))


def explain_skipped(updater: Updater, update: UpdateShare, step: int, *, closely: bool) -> RunError:
    """Returns the error for a non-finite loss or gradient. A collective of the processes with the same gradients.

    `closely` runs the network again to find the cause.
    """
    network, world, mine = updater.network, updater.world, None
    if updater.bad:
        found = explain_loss(network, updater.bad, world, step, closely=closely)
        mine = [found.message, found.where, list(found.hints)]
    if losses := [one for one in values_by_rank(updater.synchronizer, mine, world).values() if one]:
        what, where, hints = losses[0]
        return RunError(what, where, tuple(hints))
    if network.traits.sharded and not closely:  # torch would add the second computation to the next update
        return RunError("a gradient is not finite", f"step {step}", HINTS)
    return explain_gradient(updater, update, step)


def explain_gradient(updater: Updater, update: UpdateShare, step: int, *, alone: bool = False) -> RunError:
    """Returns the error for a non-finite gradient. A collective of the processes with equal gradients, or `alone`."""
    if updater.loss_fn and not updater.network.share.together:
        updater.optimizer.zero_grad(set_to_none=True)
        updater.add_gradients(update, step, averages=False)
    found = ((name, one.grad) for name, one in updater.network.model.named_parameters())
    mine = next((f"the gradient of {n} is {value_kind(g)}" for n, g in found if g is not None and not is_finite(g)), "")
    world = updater.world
    by_rank = {world.rank: mine} if alone else values_by_rank(updater.synchronizer, mine, world)
    rank = next((rank for rank, text in by_rank.items() if text), min(by_rank))
    what = by_rank[rank] or "a gradient is not finite after the all-reduce"
    return RunError(what, f"rank {rank}, step {step}", HINTS if step else FIRST_HINTS)
