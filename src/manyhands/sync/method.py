"""Finds sync methods by their names, and what they say of themselves. No torch."""

import functools
from typing import Any

from manyhands.core.choices import load_choice, module_names
from manyhands.core.needs import Need, missing

METHODS = "manyhands.sync.methods"
_LAST = 1000


@functools.cache
def methods() -> dict[str, Any]:
    """The files of all methods by name, in the order in which `auto` prefers them."""
    found = {name: load_choice(METHODS, name) for name in module_names(METHODS)}
    return dict(sorted(found.items(), key=lambda one: getattr(one[1], "PRECEDENCE", _LAST)))


def synchronizes_every_update(name: str) -> bool:
    """True for methods without a pace."""
    return bool(getattr(methods()[name], "EVERY_UPDATE", True))


def exception_of(name: str) -> str:
    """How a method makes results depend on the number of processes, in a sentence; empty if it doesn't."""
    method = methods()[name]
    if method.EXACT:
        return ""
    usual = f"Gradients are synchronized by {name} (sync.method = {name}): results depend on the number of processes."
    return getattr(method, "EXCEPTION", usual)


def refused(name: str, offers: "frozenset[Need] | set[Need]") -> Need | None:
    """The first thing that a method needs and isn't offered; None where it can be taken."""
    return missing(methods()[name].NEEDS, offers)


def option_keys(name: str) -> list[str]:
    """The options of a method's own, in the job's section `sync`."""
    section = getattr(methods()[name], "Options", None)
    return list(section.model_fields) if section else []
