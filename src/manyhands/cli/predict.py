"""manyhands predict."""

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def predict(
    run: Annotated[Path, Parameter(help="a run folder or a checkpoint in one")],
    pictures: Annotated[list[Path], Parameter(help="picture files")],
    /,
    *,
    which: Annotated[Literal["best", "last"], Parameter(help="which checkpoint")] = "best",
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="one JSON object a line")] = False,
) -> int:
    """Say what is on pictures: the most likely classes of each."""
    from manyhands.run.inspect import predict_files

    for path, guesses in predict_files(run, pictures, which=which):
        if as_json:
            print(json.dumps({"picture": str(path), "guesses": guesses}, ensure_ascii=False))
        else:
            print(f"{path}: " + ", ".join(f"{name} {share:.1%}" for name, share in guesses[:3]))
    return 0
