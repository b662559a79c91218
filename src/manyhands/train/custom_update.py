"""Samples, optimizer, scheduler and updates of custom training loops (`manyhands.session()`)."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from manyhands.checkpoint.snapshot import unflatten
from manyhands.checkpoint.trained import find_record
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.phases import CLOCK, COMMUNICATION
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.data.order import Order
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.parallel.network import MicroBatch
from manyhands.parallel.replicas.norm_pass import precise_dtype
from manyhands.train.build import build
from manyhands.train.feed import UpdateShare
from manyhands.train.loop import start_clocks
from manyhands.train.loss import as_divisor
from manyhands.train.optimize import CustomScheduler, restore_scheduler, scheduler_errors
from manyhands.train.parts import CustomParts, Parts
from manyhands.train.state import Resumable
from manyhands.train.step import Updater
from manyhands.train.trainer import Trainer

SESSION = "session"  # the key of the session's entry in a checkpoint
_LOOP = ("write for x, y in samples: session.backward(loss_of(model(x), y)); optimizer.step()",)


class OutputHook:
    """A forward hook that calls `show` with the network's output. In a copy of the network, the hook does nothing."""

    def __init__(self, show: Callable[[Any], None] | None = None) -> None:
        self._show = show

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._show:
            self._show(output)

    @override
    def __reduce__(self) -> tuple[type["OutputHook"], tuple[()]]:
        return OutputHook, ()


class CustomUpdate:
    """One update of a custom loop: yields micro-batches, takes the mean loss of each, and updates the parameters."""

    def __init__(self, updater: Updater, update: UpdateShare, step: int) -> None:
        self._updater, self._update, self._step = updater, update, step
        self._open: tuple[MicroBatch, Tensor, int] | None = None
        self._weights: list[Tensor] = []
        self._output: Tensor | None = None
        self._gradients = False  # the gradients of the last micro-batch are complete
        self.made = False  # the parameters have been updated
        self.at_last = False  # the last micro-batch has been yielded
        self._added: list[tuple[nn.Parameter, Tensor, int]] = []

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and labels of each micro-batch. The loop body runs in the job's autocast until `backward`."""
        updater = self._updater
        updater.begin(self._step)
        for number, part in enumerate(self._update):
            last = self.at_last = number == len(self._update) - 1
            part.shape.seed = updater.micro_batch_seed(self._step, number)
            inputs, labels, reported = updater.network.begin(part)
            self._open = part, labels, reported
            with updater.gradients.custom_forward_context(last=last):
                yield inputs, labels
            if self._open:
                raise UserError("the loop body didn't call session.backward", "samples", _LOOP)
        if not self.made:
            raise UserError("the loop body didn't call optimizer.step() after the last micro-batch", "samples", _LOOP)

    def store_output(self, output: Any) -> None:
        """Stores the network's output for this micro-batch, to count correct predictions."""
        self._output = output.detach() if isinstance(output, Tensor) and output.ndim == 2 else None

    def take_loss(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """Runs backward for a micro-batch's mean loss [], multiplied by the micro-batch's fraction of the update.

        `weight` is the sum of the samples' weights if the loss is a weighted mean. Returns the sum [] of
        losses and the sum [] of weights over the samples that count in this process's metrics.
        """
        if not self._open:
            raise UserError("session.backward was called twice for the same samples", "session.backward", _LOOP)
        updater, last = self._updater, self.at_last
        (part, labels, reported), self._open = self._open, None
        self._refuse_changes()
        rows = len(labels) if updater.network.share.together else part.share.count
        kind = precise_dtype(loss.device)
        counts = torch.tensor(reported, dtype=kind, device=loss.device)
        share: Tensor | float = rows / part.shape.batch
        if weight is not None:
            share = torch.as_tensor(weight, dtype=kind, device=loss.device).detach() * bool(rows)
            counts = share * bool(reported)
            self._weights.append(counts)
        if last and len(self._weights) not in (0, len(self._update)):
            hints = ("pass weight=… for all micro-batches of an update, or for none",)
            raise UserError("weight=… was passed for only some micro-batches of an update", "session.backward", hints)
        detached = torch.where(counts > 0, loss.detach(), torch.zeros_like(loss))
        if reported:
            updater.record_loss(part, self._step, detached * reported, reported)
            if self._output is not None and labels.dtype == torch.int64 and labels.shape == self._output.shape[:1]:
                updater.measured.add_predictions(self._output[:reported], labels[:reported])
            else:
                updater.measured.skip_predictions()
        self._add_gradients(loss, share, last=last)
        self._gradients, self._output = last, None
        if not last or updater.gradients.scaler or updater.network.share.together:
            found = ((one, one.grad) for one in updater.parameters)
            self._added = [(one, grad, grad._version) for one, grad in found if grad is not None]
        return detached * counts, counts

    def _add_gradients(self, loss: Tensor, share: Tensor | float, *, last: bool) -> None:
        """Runs backward. After the last micro-batch, averages the gradients over processes, which is a collective."""
        updater, total = self._updater, None
        if last and self._weights:
            with CLOCK.in_phase(COMMUNICATION):
                total = as_divisor(updater.synchronizer.replica_sum(torch.stack(self._weights).sum(), updater.world))
        # A sync method may send gradients during the last backward pass, so they are divided before it.
        early = total if not updater.network.share.collective_forward else None
        with updater.gradients.without_autocast():
            if early is not None:
                self._divide_gradients(early)
                share = share / early
            if last:
                updater.synchronizer.before_last_micro_batch()
            updater.gradients.backward_custom_loss(loss, share, last=last)
            if last:
                updater.gradients.finish()
                updater.synchronizer.on_gradients()
            if total is not None and early is None:
                self._divide_gradients(total)

    def _divide_gradients(self, total: Tensor) -> None:
        for parameter in self._updater.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(total.to(parameter.grad.dtype))

    def _refuse_changes(self) -> None:
        if any(one.grad is not grad or grad._version != version for one, grad, version in self._added):
            hints = ("clip gradients with manyhands.session(clip=1.0)", "reset gradients with optimizer.zero_grad()")
            raise UserError("the loop changed gradients before the update was complete", "samples", hints)
        self._added.clear()

    def finish(self) -> bool:
        """Updates the parameters and returns True if all gradients are complete. Else returns False. A collective."""
        if not self._gradients or self.made:
            return False
        self._refuse_changes()
        with self._updater.gradients.without_autocast():
            self._updater.finish(self._update, self._step)
        self.made = True
        return True


class PreparedOptimizer(Optimizer):
    """Wraps the user's optimizer, whose parameter groups and state it shares, for a loop over micro-batches.

    `step` does nothing before an update's last micro-batch. `zero_grad` does nothing within an unfinished update.
    """

    def __init__(self, inner: Optimizer, finish: Callable[[], object], unfinished: Callable[[], bool]) -> None:
        # torch's constructor isn't called, because groups and state belong to the inner optimizer.
        self.__dict__.update(_inner=inner, _finish=finish, _has_unfinished_update=unfinished)
        self.__dict__.update(state_dict=inner.state_dict, load_state_dict=inner.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # a scheduler wraps `step` to count calls
            hints = ("create the scheduler first, and pass session.prepare(…, scheduler=scheduler)",)
            raise UserError("a scheduler was created from a prepared optimizer", "session.prepare", hints)
        setattr(self._inner, name, value)

    def __repr__(self) -> str:
        return repr(self._inner)

    @override
    def step(self, closure: Any = None) -> Any:  # returns None; torch's type is a closure's value
        if closure is not None:
            hints = ("call session.backward(loss), then optimizer.step() without a closure",)
            raise UserError("sessions don't support closures, which compute the loss again", "optimizer.step", hints)
        self._finish()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._has_unfinished_update():
            self._inner.zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        hints = ("add the parameter group before session.prepare",)
        raise UserError("a prepared optimizer doesn't accept more parameters", "add_param_group", hints)


def postpone_steps(scheduler: LRScheduler, waits: Callable[[], bool]) -> None:
    """Makes `scheduler.step` do nothing while `waits()` returns True. The scheduler's `state_dict()` stays the same."""
    kind = type(scheduler)

    def step(self: LRScheduler, *arguments: Any, **named: Any) -> None:
        if not waits():
            kind.step(self, *arguments, **named)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


class SessionSamples:
    """Iterates over this process's micro-batches of the session's current epoch."""

    def __init__(self, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], order: Order) -> None:
        self._batches, self._order = batches, order

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches()

    def __len__(self) -> int:  # updates in an epoch
        return self._order.steps_per_epoch


def prepare_trainer(
    job: Job, folder: RunFolder | None, world: World, loop: CustomParts
) -> tuple[Trainer, dict[str, Any]]:
    """Returns the built or resumed trainer, and the session's entry in the checkpoint or {}. A collective."""
    saved = dict[str, Any]()

    def restore_groups(trainer: Trainer, found: Resumable) -> None:
        groups: Any = (found.snapshot.optimizer or {}).get("param_groups", [])
        if found.source:
            groups = unflatten(found.source.branches.get("param_groups", []), {})
        live = loop.optimizer.param_groups
        if not isinstance(trainer.updater.set_rates, CustomScheduler) and len(groups) == len(live):
            for group, before in zip(live, groups, strict=True):
                known = {*group, "initial_lr"} - {"params"}
                group.update({key: value for key, value in before.items() if key in known})

    def restore_session(trainer: Trainer, found: Resumable) -> None:
        state = found.snapshot.state.get(SESSION, {})
        if loop.scheduler and state.get("scheduler"):
            with scheduler_errors(str(found.path)):
                restore_scheduler(loop.scheduler, json.loads(state["scheduler"]))
        record = find_record(found.path, found.snapshot.state)
        changed = broadcast_plain(record.changed_names(trainer.trained.digests) if record else [], world)  # rank 0's
        saved.update({"epochs": trainer.progress.epoch, **state, "changed": changed})

    parts = Parts.from_objects(job, folder, world, loop)
    trainer = build(replace(parts, before_resume=restore_groups, after_resume=restore_session))
    start_clocks(trainer)
    return trainer, saved
