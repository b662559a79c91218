"""manyhands eval."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manyhands.cli.flags import Processes, Settings, settings
from manyhands.core.quantities import percentage
from manyhands.core.terminal import plain, show, show_json


def evaluate(  # noqa: PLR0913 - one argument for each flag
    run: Annotated[
        str, Parameter(help="a run (folder, part of its name, or last), a checkpoint, or a .pth.tar file of main.py")
    ],
    data: Annotated[str | None, Parameter(help="other data than the run's; all pictures of a plain folder")] = None,
    model: Annotated[str | None, Parameter(help="the network, if the file does not name one")] = None,
    /,
    *,
    which: Annotated[Literal["best", "last"], Parameter(help="the checkpoint to use if RUN is a run")] = "best",
    processes: Processes = None,
    data_dir: Annotated[str | None, Parameter(help="folder of the named data sets")] = None,
    device: Annotated[str | None, Parameter(help="cpu, cuda, npu …; default: the accelerator if there is one")] = None,
    set_: Settings = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")] = False,
) -> int:
    """Evaluate a run or a checkpoint on each test sample exactly once."""
    from manyhands.run.find import find_reference
    from manyhands.run.tasks import evaluate_run

    flags = {
        "data.name": data, "model.name": model, "cluster.processes": processes, "data.dir": data_dir,
        "cluster.device": device, **settings(set_ or []),
    }  # fmt: skip
    show_evaluation(evaluate_run(find_reference(run), which=which, flags=flags), as_json=as_json)
    return 0


def show_evaluation(found: dict[str, Any], *, as_json: bool) -> None:
    """Prints what an evaluation found, for people or as one JSON object."""
    if as_json:
        show_json(found)
        return
    show(plain(found["checkpoint"]) or "no checkpoint: evaluated the initial weights")
    from manyhands.report.summary import FEW_CLASSES, custom_metrics

    fifth = f"top-5 {percentage(found['top5'], 2)}%   " if found["classes"] > FEW_CLASSES else ""
    own = custom_metrics(found["metrics"], "{} {}   ")
    show(f"{found['count']} samples, each once   top-1 {percentage(found['top1'], 2)}%   {fifth}"
          f"loss {found['loss']:.4f}   {own}({plain(found['data'])})")  # fmt: skip
    worst = sorted(found["per_class"], key=lambda row: row["top1"])[:5]
    shown = [f"{plain(row['name'])} {percentage(row['top1'])}% of {row['count']}" for row in worst]
    show(f"weakest classes: {', '.join(shown)}")
