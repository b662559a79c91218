"""The public interface: which names there are, and that what they return is exported and has a type."""

import inspect
import subprocess
import sys
import typing

import pytest

import manyhands

NAMES = {
    "Axis", "CheckpointOptions", "ClusterOptions", "DataOptions", "EpochEnd", "Evaluation", "EvaluationDetail",
    "EvaluationMetrics", "Finding", "GradientCheck", "Grid", "Job", "ManyhandsError", "Mesh", "ModelOptions",
    "ParallelOptions", "Parameter", "Plan", "Run", "RunError", "RunOptions", "Session", "SessionSamples", "Subgroup",
    "SubmitOptions", "SyncOptions", "TrainOptions", "Trained", "UserError", "evaluate", "find_plan", "fit", "load",
    "open_mesh", "predict", "register_rule", "session", "verify_gradients",
}  # fmt: skip
# What may be Any, and why.
ANY_ON_PURPOSE = {"Grid.group": "a group of torch's, None where there is one process", "Plan.as_plain": "JSON data"}
# What exported classes give to our own code, and no user holds.
BEHIND = {"PlanRecord", "World"}


def test_the_exported_names():
    assert set(manyhands.__all__) == NAMES == set(manyhands._HOMES)
    assert set(dir(manyhands)) == NAMES | {"__version__"}


def public_functions():
    """Exported functions, and the exported classes' own public methods and properties, by dotted name."""
    for name in sorted(NAMES):
        thing = getattr(manyhands, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing) and not hasattr(thing, "model_fields"):
            for key, value in vars(thing).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if inspect.isfunction(function) and not key.startswith("_"):
                    yield f"{name}.{key}", function


def returned(function):
    """The classes in a function's return annotation, which is resolved with what `manyhands` exports."""
    exported = {name: getattr(manyhands, name) for name in NAMES}
    annotation = inspect.unwrap(function).__annotations__["return"]
    if isinstance(annotation, str):
        annotation = eval(annotation, {**inspect.unwrap(function).__globals__, **exported})
    waiting, found = [annotation], []
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | typing.ForwardRef):
            one = exported[one if isinstance(one, str) else one.__forward_arg__]
        found.append(one)
        waiting += [each for each in typing.get_args(one) if not isinstance(each, list)]
    return found


@pytest.mark.parametrize(
    ("name", "function"), list(public_functions()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_is_returned_is_typed_and_exported(name, function):
    kinds = returned(function)
    assert typing.Any not in kinds or name in ANY_ON_PURPOSE
    ours = {kind.__name__ for kind in kinds if inspect.isclass(kind) and kind.__module__.startswith("manyhands")}
    assert ours <= NAMES | BEHIND


def test_what_needs_no_torch_does_not_load_it():
    names = ["Job", "TrainOptions", "EvaluationMetrics", "UserError", "Mesh"]
    code = f"import sys, manyhands\nfor name in {names}:\n    assert getattr(manyhands, name)"
    subprocess.run([sys.executable, "-c", f"{code} and 'torch' not in sys.modules, name"], check=True)
