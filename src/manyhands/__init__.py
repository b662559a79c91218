"""manyhands: train an image classifier on one laptop or many machines, with one command.

The names below are the whole public interface; they are loaded when first used, since torch takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from manyhands.config.job import Job
    from manyhands.core.errors import ManyhandsError, RunError, UserError
    from manyhands.parallel.describe import register_rule
    from manyhands.run.planning import find_plan
    from manyhands.run.python import Run, evaluate, fit, parallelize, predict, session

_HOMES = {
    "Job": "manyhands.config.job",
    "ManyhandsError": "manyhands.core.errors",
    "RunError": "manyhands.core.errors",
    "UserError": "manyhands.core.errors",
    "Run": "manyhands.run.python",
    "evaluate": "manyhands.run.python",
    "find_plan": "manyhands.run.planning",
    "fit": "manyhands.run.python",
    "predict": "manyhands.run.python",
    "parallelize": "manyhands.run.python",
    "register_rule": "manyhands.parallel.describe",
    "session": "manyhands.run.python",
}

__all__ = [
    "Job", "ManyhandsError", "Run", "RunError", "UserError", "evaluate", "find_plan", "fit", "parallelize", "predict",
    "register_rule", "session",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module manyhands has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
