"""Sync methods by name, and the [sync] section of a job, with the options of all methods. Imports no torch."""

import functools
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from manyhands.core.choices import load_choice, module_names
from manyhands.core.needs import Need
from manyhands.core.options import Options, option

METHODS = "manyhands.sync.methods"
_LAST = 1000


@functools.cache
def methods() -> dict[str, Any]:
    """Returns {name: module} of all sync methods, in the order in which sync.method = auto prefers them."""
    found = {name: load_choice(METHODS, name) for name in module_names(METHODS)}
    return dict(sorted(found.items(), key=lambda one: getattr(one[1], "PRECEDENCE", _LAST)))


def synchronizes_every_update(name: str) -> bool:
    return bool(getattr(methods()[name], "EVERY_UPDATE", True))


def process_count_effect(name: str) -> str:
    """Returns a sentence on how a method's results depend on the number of processes, or "" if they don't."""
    method = methods()[name]
    if method.EXACT:
        return ""
    usual = f"Gradients are synchronized by {name} (sync.method = {name}): results depend on the number of processes."
    return getattr(method, "EXCEPTION", usual)


def missing_need(name: str, offers: "frozenset[Need] | set[Need]") -> Need | None:
    """Returns the first requirement (NEEDS) of a sync method that `offers` lacks, or None if it lacks none."""
    return next((need for need in methods()[name].NEEDS if need not in offers), None)


AUTO = "auto"  # chosen by network speed

_NAMES = f"{AUTO}, {', '.join([*methods()][:-1])} or {[*methods()][-1]}"


class CommonOptions(Options):
    """Options of gradient synchronization."""

    method: str = option("allreduce", f"gradient synchronization: {_NAMES}; {AUTO}: chosen by network speed")
    within: Literal["auto", "machine", "process"] = option(
        "auto",
        "which processes communicate over the network; process: every process; machine: one process per machine, "
        "after averaging within the machine; auto: machine if there are several machines, else process",
    )
    link: str = option("", "bandwidth between machines, such as 10mbit; empty: measured")

    @property
    def is_auto(self) -> bool:
        return self.method == AUTO


def _option_classes() -> list[type[Options]]:
    found: list[type[Options]] = []
    for name, method in methods().items():
        section = getattr(method, "Options", None)
        if section is None or not issubclass(section, Options) or section is Options:
            continue
        for key, field in section.model_fields.items():
            others = [one for one in (*found, CommonOptions) if key in one.model_fields]
            if any(repr(one.model_fields[key]) != repr(field) for one in others):
                raise TypeError(f"the sync method {name} defines the option {key} differently than another method")
        found.append(section)
    return found


if TYPE_CHECKING:
    SyncOptions = CommonOptions  # other code reads only the common options
else:
    SyncOptions = create_model(
        "SyncOptions", __base__=(*_option_classes(), CommonOptions), __doc__=CommonOptions.__doc__, __module__=__name__
    )
