"""manyhands predict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from manyhands.cli.flags import Device, Processes
from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.quantities import percentage
from manyhands.core.terminal import plain, say, show, show_json


def predict(
    run: Annotated[str, Parameter(help="a run (folder, part of its name, or last) or a checkpoint")],
    pictures: Annotated[list[Path], Parameter(help="picture files or folders of pictures")],
    /,
    *,
    which: Annotated[Literal["best", "last"], Parameter(help="the checkpoint to use if RUN is a run")] = "best",
    processes: Processes = None,
    device: Device = None,
    model: Annotated[
        str | None, Parameter(help="the network as file.py:object, if the run was trained on a Python object")
    ] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object per line")] = False,
) -> int:
    """Print the most likely classes of pictures."""
    from manyhands.run.find import find_reference
    from manyhands.run.tasks import predict_files

    found = predict_files(
        find_reference(run), pictures, which=which, model=model, processes=processes, device=device
    )  # fmt: skip
    unreadable: list[str] = []
    for path, guesses in found:
        if isinstance(guesses, str):
            unreadable.append(f"  {plain(str(path))}: {plain(guesses)}")
        if as_json:
            show_json({"picture": str(path), "error" if isinstance(guesses, str) else "guesses": guesses})
        elif not isinstance(guesses, str):
            show(line_of(path, guesses))
    if unreadable:
        say("\n".join([f"pictures that can't be read: {len(unreadable):,}", *unreadable]))
    return EXIT_FAILED if unreadable else EXIT_OK


def line_of(picture: Path, guesses: Sequence[tuple[str, float]]) -> str:
    """What is said of one picture; its name and its classes' are others' words."""
    return f"{plain(str(picture))}: " + ", ".join(f"{plain(name)} {percentage(share)}%" for name, share in guesses[:3])
