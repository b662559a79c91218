"""Finds a sync method by its name, and says which parallel modes take one."""

from manyhands.core.errors import UserError
from manyhands.core.plugins import module_names, unknown_choice

METHODS = "manyhands.sync.methods"

# Which methods each parallel mode can be combined with; the mode agrees by itself where there is none but allreduce.
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "single": ("allreduce",),
    "dataparallel": ("allreduce",),
    "data": ("allreduce",),
    "fsdp": ("allreduce",),
    "hybrid": ("allreduce",),
    "semi": ("allreduce",),
    "auto": ("allreduce",),
}


def resolve_method(method: str, mode: str) -> str:
    """The method to run under a parallel mode.

    Raises:
        UserError: there is no such method, or the mode can't take it.
    """
    if method not in module_names(METHODS):
        raise unknown_choice("sync method", method, module_names(METHODS), "sync.method")
    if method not in COMBINATIONS[mode]:
        raise UserError(f"{mode} can't be combined with {method}", "sync.method", ("--sync allreduce",))
    return method
