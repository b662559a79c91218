"""manyhands eval."""

import json
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manyhands.cli.flags import Processes, Settings
from manyhands.cli.train import settings


def evaluate(  # noqa: PLR0913 - one argument for each flag
    run: Annotated[str, Parameter(help="a run's folder or short name, a checkpoint, or main.py's .pth.tar")],
    data: Annotated[str | None, Parameter(help="other data than the run's; a plain folder is evaluated whole")] = None,
    model: Annotated[str | None, Parameter(help="the network, where the file doesn't say")] = None,
    /,
    *,
    which: Annotated[Literal["best", "last"], Parameter(help="which checkpoint of a run")] = "best",
    processes: Processes = None,
    data_dir: Annotated[str | None, Parameter(help="where named data sets lie")] = None,
    device: Annotated[str | None, Parameter(help="cpu, cuda …")] = None,
    set_: Settings = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="one JSON object")] = False,
) -> int:
    """Evaluate a run or a checkpoint: each test sample exactly once."""
    from manyhands.run.find import find_reference
    from manyhands.run.inspect import evaluate_run

    flags = {
        "data.name": data, "model.name": model, "cluster.processes": processes, "data.dir": data_dir,
        "cluster.device": device, **settings(set_ or []),
    }  # fmt: skip
    show(evaluate_run(find_reference(run), which=which, flags=flags), as_json=as_json)
    return 0


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Prints what an evaluation found, for people or as one JSON object."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    print(f"{found['checkpoint'] or 'no checkpoint: the network as it starts'}")
    print(f"{found['count']} samples, each once   top-1 {found['top1']:.2%}   top-5 {found['top5']:.2%}   "
          f"loss {found['loss']:.4f}   ({found['data']})")  # fmt: skip
    worst = sorted(found["per_class"], key=lambda row: row["top1"])[:5]
    print("weakest classes: " + ", ".join(f"{row['name']} {row['top1']:.1%} of {row['count']}" for row in worst))
