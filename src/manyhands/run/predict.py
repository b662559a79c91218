"""Says what is on pictures, by what a run has learnt."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from manyhands.cluster.hosts.this_process import participate
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.user_code import announce
from manyhands.run.evaluate import resolve_checkpoint
from manyhands.run.load import load_worker
from manyhands.run.own_code import record_of
from manyhands.run.task import take_part_or_start

Guesses = list[tuple[str, float]]


def predict_files(
    reference: Path,
    pictures: Sequence[Path],
    *,
    which: str = "best",
    model: str | None = None,
    processes: int | None = None,
    device: str | None = None,
) -> Iterator[tuple[Path, Guesses | str]]:
    """The most likely classes of each picture, with their probabilities; needs nothing but the checkpoint.

    A picture that can't be read gives a text that says why.

    Args:
        reference: a run folder, or a checkpoint.
        pictures: files, and folders of which all pictures are meant.
        which: "best" or "last", for a run folder.
        model: the network's name, where the run doesn't say it.
        processes: to share the pictures; None: this one, or those of a launcher.
        device: where to compute; None: the CPU, or what several processes take by themselves.

    Raises:
        UserError: a picture is missing, or the checkpoint can't be used without more.
    """
    files = list_pictures(pictures)
    path = resolve_checkpoint(reference, which)
    record = record_of(path)
    if model is None and record:
        announce([record.name], path, record, "--model {}")
    job = load_job({"cluster.processes": processes, "cluster.device": device}).job
    if (processes or 1) > 1 or participate(job.cluster).process_info:
        argument = {
            "checkpoint": str(path.resolve()),
            "pictures": [str(file.resolve()) for file in files],
            "model": model,
        }
        found = take_part_or_start(job, "predict", argument)
        yield from zip(files, found["guesses"], strict=True) if found else ()
        return
    device = "cpu" if job.cluster.device == "auto" else job.cluster.device
    yield from zip(files, load_worker("own_process").guess_files(path, files, model, device), strict=True)


def list_pictures(named: Iterable[Path]) -> list[Path]:
    """Files as they are named; of a folder all pictures in it, at any depth, by name.

    Raises:
        UserError: there is no such file, or a folder holds no picture.
    """
    from manyhands.data.decode import PICTURE_SUFFIXES
    from manyhands.data.walk import is_junk

    found: list[Path] = []
    for path in named:
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*") if file.suffix.lower() in PICTURE_SUFFIXES and file.is_file()
            )
            inside = [file for file in inside if not any(map(is_junk, file.relative_to(path).parts))]
            if not inside:
                hints = (f"name a folder with pictures that end in {', '.join(sorted(PICTURE_SUFFIXES))}",)
                raise UserError(f"there is no picture in {path}", str(path), hints)
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"there is no picture {path}", "", ("name picture files or folders of pictures",))
    return found
