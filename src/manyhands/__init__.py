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
    from manyhands.parallel.grid import Grid
    from manyhands.parallel.hybrid import Axis, open_mesh
    from manyhands.parallel.marks import Parameter
    from manyhands.parallel.proof.verdict import GradientCheck
    from manyhands.parallel.verify import verify_gradients
    from manyhands.run.planning import find_plan
    from manyhands.run.python import Run, evaluate, fit, load, parallelize, predict, session

_HOMES = {
    "Axis": "manyhands.parallel.hybrid",
    "GradientCheck": "manyhands.parallel.proof.verdict",
    "Grid": "manyhands.parallel.grid",
    "Job": "manyhands.config.job",
    "ManyhandsError": "manyhands.core.errors",
    "RunError": "manyhands.core.errors",
    "UserError": "manyhands.core.errors",
    "Parameter": "manyhands.parallel.marks",
    "Run": "manyhands.run.python",
    "evaluate": "manyhands.run.python",
    "find_plan": "manyhands.run.planning",
    "fit": "manyhands.run.python",
    "load": "manyhands.run.python",
    "open_mesh": "manyhands.parallel.hybrid",
    "predict": "manyhands.run.python",
    "parallelize": "manyhands.run.python",
    "register_rule": "manyhands.parallel.describe",
    "session": "manyhands.run.python",
    "verify_gradients": "manyhands.parallel.verify",
}

__all__ = [
    "Axis", "GradientCheck", "Grid", "Job", "ManyhandsError", "Parameter", "Run", "RunError", "UserError", "evaluate",
    "find_plan", "fit", "load", "open_mesh", "parallelize", "predict", "register_rule", "session", "verify_gradients",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module manyhands has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
