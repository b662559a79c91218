"""manyhands: train an image classifier on one laptop or many machines, with one command.

`__all__` lists the public interface. Each name is imported on first use, because importing torch is slow.
"""

__version__ = "0.1.0"

# Not typing.TYPE_CHECKING: importing typing takes longer than all other steps before the command handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from manyhands.checkpoint.options import CheckpointOptions
    from manyhands.config.job import ClusterOptions, Job, RunOptions, SubmitOptions, TrainOptions
    from manyhands.core.errors import ManyhandsError, RunError, UserError
    from manyhands.core.mesh import Mesh
    from manyhands.core.records import EvaluationDetail, EvaluationMetrics
    from manyhands.data.options import DataOptions
    from manyhands.models.options import ModelOptions
    from manyhands.parallel.group.collectives import Subgroup
    from manyhands.parallel.mesh.grid import Axis, Grid, open_mesh
    from manyhands.parallel.mesh.marks import Parameter
    from manyhands.parallel.options import ParallelOptions
    from manyhands.parallel.plan import Plan
    from manyhands.parallel.split.tracing import register_rule
    from manyhands.parallel.verify import Finding, GradientCheck, verify_gradients
    from manyhands.run.python import Run, evaluate, fit, load, predict, session
    from manyhands.sync.options import SyncOptions
    from manyhands.train.custom_update import SessionSamples
    from manyhands.train.loss import Evaluation
    from manyhands.train.objects import EpochEnd
    from manyhands.train.session import Session
    from manyhands.train.trained import Trained
    from manyhands.worker.plan_search import find_plan

_HOMES = {
    "Axis": "manyhands.parallel.mesh.grid",
    "CheckpointOptions": "manyhands.checkpoint.options",
    "ClusterOptions": "manyhands.config.job",
    "DataOptions": "manyhands.data.options",
    "EpochEnd": "manyhands.train.objects",
    "Evaluation": "manyhands.train.loss",
    "EvaluationDetail": "manyhands.core.records",
    "EvaluationMetrics": "manyhands.core.records",
    "Finding": "manyhands.parallel.verify",
    "GradientCheck": "manyhands.parallel.verify",
    "Grid": "manyhands.parallel.mesh.grid",
    "Job": "manyhands.config.job",
    "ManyhandsError": "manyhands.core.errors",
    "Mesh": "manyhands.core.mesh",
    "ModelOptions": "manyhands.models.options",
    "ParallelOptions": "manyhands.parallel.options",
    "Parameter": "manyhands.parallel.mesh.marks",
    "Plan": "manyhands.parallel.plan",
    "Run": "manyhands.run.python",
    "RunError": "manyhands.core.errors",
    "RunOptions": "manyhands.config.job",
    "Session": "manyhands.train.session",
    "SessionSamples": "manyhands.train.custom_update",
    "Subgroup": "manyhands.parallel.group.collectives",
    "SubmitOptions": "manyhands.config.job",
    "SyncOptions": "manyhands.sync.options",
    "TrainOptions": "manyhands.config.job",
    "Trained": "manyhands.train.trained",
    "UserError": "manyhands.core.errors",
    "evaluate": "manyhands.run.python",
    "find_plan": "manyhands.worker.plan_search",
    "fit": "manyhands.run.python",
    "load": "manyhands.run.python",
    "open_mesh": "manyhands.parallel.mesh.grid",
    "predict": "manyhands.run.python",
    "register_rule": "manyhands.parallel.split.tracing",
    "session": "manyhands.run.python",
    "verify_gradients": "manyhands.parallel.verify",
}

__all__ = [
    "Axis", "CheckpointOptions", "ClusterOptions", "DataOptions", "EpochEnd", "Evaluation", "EvaluationDetail",
    "EvaluationMetrics", "Finding", "GradientCheck", "Grid", "Job", "ManyhandsError", "Mesh", "ModelOptions",
    "ParallelOptions", "Parameter", "Plan", "Run", "RunError", "RunOptions", "Session", "SessionSamples", "Subgroup",
    "SubmitOptions", "SyncOptions", "TrainOptions", "Trained", "UserError", "evaluate", "find_plan", "fit", "load",
    "open_mesh", "predict", "register_rule", "session", "verify_gradients",
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module manyhands has no attribute {name}")
    if not name.endswith("Error"):
        importlib.import_module("manyhands.cli.system").require_system()
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
