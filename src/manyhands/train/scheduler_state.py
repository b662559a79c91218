"""What a torch scheduler has counted, as plain data for a checkpoint, and back."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from manyhands.core.errors import UserError

_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}
_COUNTED = {"base_lrs", "last_epoch", "_step_count", "_last_lr"}  # by each scheduler
_INNER = "_schedulers"  # those that one is made of


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Its state as data that JSON gives back as it was; functions and counters are constants of its making.

    Raises:
        UserError: it keeps something else.
    """
    found = dict[str, Any]()
    for name, value in scheduler.state_dict().items():
        try:
            found.update({} if _is_constant(value) else {name: as_plain_data(value)})
        except TypeError as error:
            kind = type(scheduler).__name__
            hints = ("store only numbers, strings, lists and dicts", "or return only those from state_dict")
            what = f"the scheduler {kind} has a {error} in {name}, which a checkpoint can't hold"
            raise UserError(what, f"{kind}.state_dict", hints) from None
    return found


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Puts a scheduler where it was, by what `scheduler_state` has given of it; the rest stays as it was made.

    Raises:
        Exception: this is no state of it; see `reading_of`.
    """
    given = {name: from_plain_data(value) for name, value in state.items()}
    _refuse_state_of_another(scheduler, given)
    scheduler.load_state_dict({**scheduler.state_dict(), **given})
    # The optimizer has made steps, in another process: else torch warns of a scheduler that comes first.
    scheduler.optimizer.__dict__["_opt_called"] = True


@contextmanager
def reading_of(where: str) -> Generator[None]:
    """Whatever fails in here is the fault of a scheduler's state in the checkpoint `where`: UserError."""
    try:
        yield
    except Exception as error:
        what = f"the scheduler's state in the checkpoint can't be restored: {type(error).__name__}: {error}"
        hints = ("remove this checkpoint to resume from the previous one", "or start a new run in another folder")
        raise UserError(what, where, hints) from error


def _refuse_state_of_another(scheduler: LRScheduler, given: Mapping[str, Any]) -> None:
    made, own = scheduler_state(scheduler), not type(scheduler).__module__.startswith("torch.")
    # What one of the user's own keeps besides may change its kind as it likes.
    kinds = {name: value for name, value in made.items() if name != _INNER and (name in _COUNTED or not own)}
    refuse_other_kinds(given, kinds, lambda name: name not in made and hasattr(scheduler, name))
    if _INNER in made and _INNER in given:
        for one, state in zip(getattr(scheduler, _INNER), given[_INNER], strict=True):
            _refuse_state_of_another(one, state)


def refuse_other_kinds(found: Mapping[str, Any], made: Mapping[str, Any], taken: Callable[[str], bool]) -> None:
    """Raises ValueError where values by name can't take the place of what is there.

    Args:
        found: the values.
        made: what is there, as plain data.
        taken: whether a name that isn't among it stands for something else.
    """
    for name, value in found.items():
        if not _fits(value, from_plain_data(made[name])) if name in made else taken(name):
            raise ValueError(f"{name} is {str(value)[:60]}")


def _fits(value: Any, made: Any) -> bool:
    """Whether a value is of another's kind: a number for a number, a text for a text, and so on in lists and dicts."""
    if isinstance(made, list | tuple):
        alike = isinstance(value, list | tuple) and len(value) == len(made)
        return alike and all(map(_fits, value, made))
    if isinstance(made, dict):
        return (
            isinstance(value, dict)
            and value.keys() == made.keys()
            and all(_fits(value[key], made[key]) for key in made)
        )
    return made is None or isinstance(value, str if isinstance(made, str) else int | float)


def as_plain_data(value: Any) -> Any:
    """Numbers, texts and None, in lists, tuples and dicts, as JSON can hold them. Raises TypeError: names the kind."""
    kind = type(value).__name__
    if type(value) is dict:
        return {kind: [[as_plain_data(key), as_plain_data(one)] for key, one in value.items() if not _is_constant(one)]}
    if type(value) in (list, tuple):
        return {kind: [as_plain_data(one) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(kind)


def from_plain_data(value: Any) -> Any:
    """What `as_plain_data` was given. Raises ValueError, TypeError, KeyError: nothing that it gives."""
    if isinstance(value, list):
        raise TypeError("unsupported list")
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    return _KINDS[kind](from_plain_data(one) if kind != "dict" else map(from_plain_data, one) for one in entries)


def _is_constant(value: Any) -> bool:
    return callable(value) or isinstance(value, Counter)
