"""What a user's own loop is given in the place of its optimizer and scheduler: they act once an update is complete."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from manyhands.core.errors import UserError


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, with their groups and state, in a loop over micro-batches.

    `step` does nothing before an update's last micro-batch, and `zero_grad` nothing within an unfinished update.

    Args:
        inner: the user's own.
        finish: makes the update if its gradients are all there.
        unfinished: true within an update.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, finish: Callable[[], object], unfinished: Callable[[], bool]
    ) -> None:
        # Not torch's constructor: groups and state are the inner optimizer's own.
        self.__dict__.update(_inner=inner, _finish=finish, _unfinished=unfinished)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # a scheduler puts its own count around it
            hints = ("create the scheduler first, and pass session.prepare(…, scheduler=scheduler)",)
            raise UserError("a scheduler was created from a prepared optimizer", "session.prepare", hints)
        setattr(self._inner, name, value)

    def __repr__(self) -> str:
        return repr(self._inner)

    @override
    def step(self, closure: Any = None) -> Any:  # None; torch's own type names a closure's value
        if closure is not None:
            hints = ("call session.backward(loss), then optimizer.step() without a closure",)
            raise UserError("sessions don't support closures, which compute the loss again", "optimizer.step", hints)
        self._finish()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._unfinished():
            self._inner.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        hints = ("add the parameter group before session.prepare",)
        raise UserError("a prepared optimizer doesn't accept more parameters", "add_param_group", hints)


def as_given(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's own, also of one that was prepared before."""
    return optimizer.__dict__["_inner"] if isinstance(optimizer, PreparedOptimizer) else optimizer


def postpone_steps(scheduler: LRScheduler, waits: Callable[[], bool]) -> None:
    """Has a scheduler's `step` do nothing while `waits` is true; its state stays as it is, to be saved."""
    kind = type(scheduler)

    def step(self: LRScheduler, *arguments: Any, **named: Any) -> None:
        if not waits():
            kind.step(self, *arguments, **named)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def take_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Gives an optimizer's groups their saved settings, such as the rate that a scheduler has come to."""
    if len(saved) != len(optimizer.param_groups):
        return
    for live, before in zip(optimizer.param_groups, saved, strict=True):
        live.update({key: value for key, value in before.items() if key in live and key != "params"})
        live.update({key: value for key, value in before.items() if key == "initial_lr"})
