"""The commands that use a trained network: eval and predict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from manyhands.cli.flags import Device, EvaluateFlags, Help, Json, Processes, Which
from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.quantities import percentage
from manyhands.core.terminal import plain, say, show, show_json


def evaluate(
    run: Annotated[str, Help("a run (folder, part of its name, or last), a checkpoint, or a .pth.tar file")],
    data: Annotated[
        str | None, Help("evaluation data; default: as in the run; a folder without train/ and val/ is used entirely")
    ] = None,
    model: Annotated[str | None, Help("the network; required if RUN is a file that does not name it")] = None,
    /,
    *,
    which: Which = "best",
    flags: EvaluateFlags = EvaluateFlags(),
    as_json: Json = False,
) -> int:
    """Evaluate a run or a checkpoint on each test sample exactly once."""
    from manyhands.run.registry import find_reference
    from manyhands.run.tasks import evaluate_run

    values = {"data.name": data, "model.name": model} | flags.job_values()
    if found := evaluate_run(find_reference(run), which=which, flags=values):
        show_evaluation(found, as_json=as_json)
    return 0


def show_evaluation(found: dict[str, Any], *, as_json: bool) -> None:
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


def predict(
    run: Annotated[str, Help("a run (folder, part of its name, or last) or a checkpoint")],
    pictures: Annotated[list[Path], Help("picture files or folders of pictures")],
    /,
    *,
    which: Which = "best",
    processes: Processes = None,
    device: Device = None,
    model: Annotated[
        str | None, Help("the network as file.py:object; required if the run was given a network object")
    ] = None,
    as_json: Annotated[bool, Help("print one JSON object per picture", "--json")] = False,
) -> int:
    """Print the most likely classes of pictures."""
    from manyhands.run.registry import find_reference
    from manyhands.run.tasks import predict_files

    folder = find_reference(run)
    unreadable: list[str] = []
    for path, guesses in predict_files(folder, pictures, which=which, model=model, processes=processes, device=device):
        if isinstance(guesses, str):
            unreadable.append(f"  {plain(str(path))}: {plain(guesses)}")
        if as_json:
            show_json({"picture": str(path), "error" if isinstance(guesses, str) else "guesses": guesses})
        elif not isinstance(guesses, str):
            show(prediction_line(path, guesses))
    if unreadable:
        say("\n".join([f"pictures that can't be read: {len(unreadable):,}", *unreadable]))
    return EXIT_FAILED if unreadable else EXIT_OK


def prediction_line(picture: Path, guesses: Sequence[tuple[str, float]]) -> str:
    """Formats a picture's path and its three most likely classes, without control characters."""
    return f"{plain(str(picture))}: " + ", ".join(f"{plain(name)} {percentage(share)}%" for name, share in guesses[:3])
