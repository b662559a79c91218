"""The learning rates of each update: by a built-in schedule, a custom function of the step, or a torch scheduler."""

import contextlib
import inspect
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.user_code import users_line
from manyhands.train.objects import brought
from manyhands.train.optimize import learning_rate, set_learning_rate, with_own_rate

_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Returns the scheduler's state as JSON data, without functions. Raises UserError for attributes of other types."""
    found = dict[str, Any]()
    for name, value in scheduler.state_dict().items():
        try:
            found.update({} if _is_constant(value) else {name: as_plain_data(value)})
        except TypeError as error:
            kind = type(scheduler).__name__
            hints = ("store only numbers, strings, lists and dicts", "or return only those from state_dict")
            what = f"the attribute {name} of the scheduler {kind} is a {error}, which can't be saved"
            raise UserError(what, f"{kind}.state_dict", hints) from None
    return found


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Restores a scheduler from `scheduler_state`'s result; any exception means invalid data; see `reading_of`."""
    given = {name: from_plain_data(value) for name, value in state.items()}
    if not isinstance(given.get("last_epoch", 0), int):
        raise ValueError(f"last_epoch is not an integer: {str(given['last_epoch'])[:60]}")
    scheduler.load_state_dict({**scheduler.state_dict(), **given})
    # Otherwise torch warns that the scheduler's step comes before the optimizer's.
    scheduler.optimizer.__dict__["_opt_called"] = True


@contextlib.contextmanager
def reading_of(where: str) -> Generator[None]:
    """Converts exceptions in the context to a UserError about the scheduler's state in the checkpoint `where`."""
    try:
        yield
    except Exception as error:
        what = f"the scheduler's state in the checkpoint can't be restored: {type(error).__name__}: {error}"
        hints = ("remove this checkpoint to resume from the previous one", "or start a new run in another folder")
        raise UserError(what, where, hints) from error


def as_plain_data(value: Any) -> Any:
    """Converts numbers, texts, None, lists, tuples and dicts to JSON data. Raises TypeError with the type's name."""
    kind = type(value).__name__
    if type(value) is dict:
        return {kind: [[as_plain_data(key), as_plain_data(one)] for key, one in value.items() if not _is_constant(one)]}
    if type(value) in (list, tuple):
        return {kind: [as_plain_data(one) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(kind)


def from_plain_data(value: Any) -> Any:
    """Inverts `as_plain_data`. Raises ValueError, TypeError or KeyError for other data."""
    if isinstance(value, list):
        raise TypeError("unsupported list")
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    return _KINDS[kind](from_plain_data(one) if kind != "dict" else map(from_plain_data, one) for one in entries)


def _is_constant(value: Any) -> bool:
    return callable(value) or isinstance(value, Counter)


SetRates = Callable[[int], None]  # sets the learning rates for an update, given its index from 0
_WHERE = "train.schedule"


def make_schedule(
    optimizer: torch.optim.Optimizer, options: TrainOptions, steps_per_epoch: int, own: Callable[..., Any] | None = None
) -> SetRates:
    """Creates the function that sets learning rates; a custom one, such as `own`, is tested on the first update."""
    function, options = brought(_WHERE, options.schedule, own), with_own_rate(options, optimizer)
    if function is None:
        return lambda step: set_learning_rate(optimizer, learning_rate(options, step, steps_per_epoch))
    of_optimizer, asked = _asked_for(function, max(1, options.epochs * steps_per_epoch), steps_per_epoch)

    def set_rates(step: int) -> None:
        set_learning_rate(optimizer, options.lr * _part(function(step, **asked), step))

    try:
        if of_optimizer:
            scheduler = CustomScheduler(function(optimizer, **asked), optimizer)
            if scheduler.waits and not options.evaluate_every:
                what = "the schedule needs evaluations, but evaluate_every=0 evaluates only at the end"
                raise UserError(what, _WHERE, ("set train.evaluate_every to 1, or choose another schedule",))
            return scheduler
        set_rates(0)
    except UserError:
        raise
    except Exception as error:
        given = "with this optimizer" if of_optimizer else "at step 0"
        what = f"the schedule failed {given}: {type(error).__name__}: {error}"
        hints = () if of_optimizer else ("for a torch scheduler, name the function's first parameter optimizer",)
        raise UserError(what, users_line(error) or _WHERE, hints) from error
    return set_rates


def _asked_for(function: Any, total_steps: int, steps_per_epoch: int) -> tuple[bool, dict[str, int]]:
    """Returns True if a function takes the optimizer instead of the step, and the function's further arguments."""
    of_step = "pass a function of the step: schedule=lambda step: 0.99 ** step"
    if not callable(function):
        of_optimizer = "or of the optimizer: schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9)"
        kind = type(function).__name__
        raise UserError(f"the schedule is a {kind}, not a function", _WHERE, (of_step, of_optimizer))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions in C have no signature
        return False, {}
    if not parameters:
        raise UserError("the schedule takes no argument", _WHERE, (of_step,))
    first, *others = parameters
    known = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    for one in others:
        required = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if required and one.name not in known:
            hints = ("use only the further parameters total_steps and steps_per_epoch",)
            raise UserError(f"the schedule function has an unknown parameter: {one.name}", _WHERE, hints)
    return first.name == "optimizer", {one.name: known[one.name] for one in others if one.name in known}


def _part(value: Any, step: int) -> float:
    """Converts the result of the user's function to a fraction of the peak rate. Raises UserError if it is none."""
    try:
        part = float(value)
    except (TypeError, ValueError):
        hints = ("return a number, the factor of the peak learning rate",)
        raise UserError(f"the schedule returned a {type(value).__name__} at step {step}", _WHERE, hints) from None
    if not math.isfinite(part) or part < 0:
        hints = ("return the factor of the peak learning rate, 0 or higher",)
        raise UserError(f"the schedule returned {part} at step {step}", _WHERE, hints)
    return part


class CustomScheduler:
    """A torch scheduler, stepped before each update except the first, or after each evaluation if it needs the loss.

    A resumed run repeats all steps of torch's own schedulers, so that a longer run has the rates of its new length. The
    state of ReduceLROnPlateau and of custom classes, which may depend on more than the step, is saved; if such a
    scheduler is created with other arguments (for a longer run), its steps are repeated too. `waits`: it needs the
    loss.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        kind = self._kind = type(scheduler).__name__
        if not isinstance(scheduler, LRScheduler):
            hints = ("return a torch.optim.lr_scheduler.LRScheduler of the optimizer",)
            raise UserError(f"the schedule function returned a {kind}", _WHERE, hints)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            hints = ("create the scheduler from the function's argument",)
            raise UserError(f"the schedule's {kind} belongs to another optimizer", _WHERE, hints)
        self.waits = isinstance(scheduler, ReduceLROnPlateau)
        self._scheduler: Any = scheduler
        if self.waits and self._scheduler.mode != "min":
            raise UserError(f'{kind} monitors the loss, but has mode="max"', _WHERE, ('set mode="min"',))
        self._optimizer, self._made = optimizer, 0
        self._as_made = self._now() if self.waits or not _follows_steps(scheduler) else None

    def __call__(self, step: int) -> None:
        if self.waits:
            return
        # catch_warnings makes torch repeat the warnings of earlier updates, so usual steps don't enter it.
        usual = 0 < self._made == step - 1
        with contextlib.nullcontext() if usual else warnings.catch_warnings():
            if not usual:  # a resumed run has made no update yet, or a loss scaler skipped the first
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while self._made < step:
                self._scheduler.step()
                self._made += 1

    def evaluated(self, loss: float) -> None:
        """Steps the scheduler with the loss of an evaluation, if it needs the loss."""
        if self.waits:
            self._scheduler.step(loss)

    def saved(self) -> str:
        """Returns the state as JSON data; empty for a scheduler whose steps are repeated."""
        if self._as_made is None:
            return ""
        return json.dumps({"kind": self._kind, "made": self._made, "as_made": self._as_made, "now": self._now()})

    def resume(self, saved: str, step: int) -> None:
        """Restores the result of `saved` if it fits a run at `step`; any exception means that it is invalid."""
        if (made := self._as_made) is None:
            return
        found = json.loads(saved)
        before, now = found["as_made"], found["now"]
        changed = _changed(before["state"], now["state"])
        alike = all(made["state"].get(name) == one for name, one in before["state"].items() if name not in changed)
        if found["kind"] != self._kind or not (self.waits or (alike and found["made"] == max(0, step - 1))):
            return
        restore_scheduler(self._scheduler, changed)
        if not self.waits or before["groups"] == made["groups"]:
            for live, *both in zip(self._optimizer.param_groups, before["groups"], now["groups"], strict=True):
                live.update({name: from_plain_data(one) for name, one in _changed(*both).items()})
        self._made = int(found["made"])

    def _now(self) -> dict[str, Any]:
        groups = [
            {name: as_plain_data(one) for name, one in group.items() if type(one) in (int, float, tuple)}
            for group in self._optimizer.param_groups
        ]
        return {"state": scheduler_state(self._scheduler), "groups": groups}


def _follows_steps(scheduler: Any) -> bool:
    """Returns True for torch's own schedulers, including all that they contain."""
    inner = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__.startswith("torch.") and all(map(_follows_steps, inner))


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in now.items() if name not in before or before[name] != one}
