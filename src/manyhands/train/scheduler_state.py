"""What a torch scheduler has counted, as plain data for a checkpoint, and back."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from manyhands.core.errors import UserError

_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}


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
            mend = ("numbers, texts, lists and dicts", "or a state_dict of its own that gives those")
            what = f"the scheduler {kind} keeps a {error} in {name}, which a checkpoint can't hold"
            raise UserError(what, f"{kind}.state_dict", mend) from None
    return found


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Puts a scheduler where it was, by what `scheduler_state` has given of it; the rest stays as it was made."""
    given = {name: from_plain_data(value) for name, value in state.items()}
    scheduler.load_state_dict({**scheduler.state_dict(), **given})
    # The optimizer has made steps, in another process: else torch warns of a scheduler that comes first.
    scheduler.optimizer.__dict__["_opt_called"] = True


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
    """What `as_plain_data` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    return _KINDS[kind](from_plain_data(one) if kind != "dict" else map(from_plain_data, one) for one in entries)


def _is_constant(value: Any) -> bool:
    return callable(value) or isinstance(value, Counter)
