"""Uses what a run has learnt: evaluates a checkpoint, or says what is on pictures."""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyhands.cluster.orders import Orders
from manyhands.cluster.rendezvous import participate
from manyhands.cluster.start import open_here
from manyhands.cluster.supervise import Watch, supervise
from manyhands.config.job import Job
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.folder import RunFolder
from manyhands.core.outside import read_object
from manyhands.run.logs import read_places
from manyhands.run.train import WORK, failure_of
from manyhands.run.worker import Failed, as_error, evaluate_here


def evaluate_run(reference: Path, *, which: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates a run's checkpoint, or a file, on the test split.

    Args:
        reference: a run folder, a checkpoint, or a .pth.tar, .pth or .safetensors file.
        which: "best" or "last", for a run folder.
        flags: changes to the run's job, by dotted key.

    Returns:
        checkpoint, count, loss, top1, top5, per_class and confusion, as plain data.

    Raises:
        ManyhandsError: there is no such run, or the evaluation failed.
    """
    job, path = job_of(reference, flags), resolve_checkpoint(reference, which)
    return _evaluate_by_agent(job, path)


def evaluate_job(job: Job, path: Path | None) -> dict[str, Any] | None:
    """Evaluates a checkpoint, or the network as the job makes it, on the processes that the job names.

    Returns:
        What `evaluate_run` does; None on processes other than the first.

    Raises:
        ManyhandsError: the evaluation failed.
    """
    membership = participate(job.cluster).membership
    if membership is None:
        return _evaluate_by_agent(job, path)
    with _private_folder() as folder:
        try:
            found = evaluate_here(job, membership, folder, {"checkpoint": path}, _say)
        except Failed as failed:
            raise as_error(failed.record) from failed.__cause__
    return {"checkpoint": str(path or ""), **found} if membership.rank == 0 else None


def _evaluate_by_agent(job: Job, path: Path | None) -> dict[str, Any]:
    found = run_by_agent(job, {"task": "evaluate", "checkpoint": str(path.resolve()) if path else ""})
    return {"checkpoint": str(path or ""), **found}


def run_by_agent(job: Job, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs a worker's task on the processes that the job names, on this machine, and keeps nothing of it.

    Args:
        job: that the task is about.
        argument: "task", and what it needs besides the job; plain data.

    Returns:
        What the first process returned.

    Raises:
        ManyhandsError: the task failed.
    """
    with _private_folder() as folder:
        given = {"job": job.model_dump(mode="json"), "folder": str(folder.path), **argument}
        orders = Orders(
            WORK, given, str(folder.ranks), [job.cluster.processes],
            device=job.cluster.device, threads=job.cluster.threads,
        )  # fmt: skip
        ending = supervise([open_here(folder.ranks / "agent.log")], [orders], Watch())
        if not ending.ok:
            raise failure_of(folder, ending)
        return ending.returned[0]


@contextmanager
def _private_folder() -> Iterator[RunFolder]:
    """A run folder for the length of an evaluation, which nobody keeps."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as private:
        folder = RunFolder(Path(private))
        folder.failures.mkdir(parents=True)
        yield folder


def _say(text: str) -> None:
    sys.stderr.write(f"manyhands: {text}\n")
    sys.stderr.flush()


def job_of(reference: Path, flags: Mapping[str, Any]) -> Job:
    """The job that a checkpoint belongs to, with changes; for a lone file the flags must say data and model."""
    if not reference.exists():
        raise UserError(
            f"there is nothing at {reference}", "", ("name a run folder, a checkpoint, or a .pth.tar file",)
        )
    for folder in (reference, *reference.parents[:2]):
        if RunFolder(folder).exists():
            return _following(load_job(dict(flags), file=RunFolder(folder).job).job, RunFolder(folder))
    if not flags.get("data.name"):
        raise UserError(
            f"{reference} is in no run folder, so the data must be named", "", ("manyhands eval FILE DATA MODEL",)
        )
    return load_job(dict(flags)).job


def _following(job: Job, folder: RunFolder) -> Job:
    """The job of a run whose processes searched for a plan, following the one that they found."""
    searched = job.parallel.mode == "auto" or job.parallel.fill == "search"
    if not searched or not folder.plan.is_file():
        return job
    content = read_object(folder.plan) or {}
    found = {"mode": "data"} if content.get("mode") == "data" else {"mode": "semi", "plan": str(folder.plan)}
    options = {"mesh": "", "pin": (), "fill": "data", **found}
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=options)})


def resolve_checkpoint(reference: Path, which: str) -> Path:
    """The checkpoint folder or file that is meant.

    Raises:
        UserError: there is none, or it lies on another machine.
    """
    from manyhands.checkpoint.load import resolve

    folder = RunFolder(reference)
    if folder.exists() and not folder.has_checkpoints():
        away = next((place for place in read_places(folder) if place.has(0) and not place.local), None)
        if away:
            raise UserError(
                f"the checkpoints of {reference} are on {away.host}, where rank 0 was",
                f"{away.host}:{away.folder}/checkpoints",
                (f"scp -r {away.host}:{away.folder}/checkpoints {reference}/",),
            )
    return resolve(reference, which)  # pyright: ignore[reportArgumentType]


def predict_files(
    reference: Path, pictures: Sequence[Path], *, which: str
) -> Iterator[tuple[Path, list[tuple[str, float]]]]:
    """The most likely classes of each picture, with their probabilities.

    Raises:
        UserError: a picture is missing or broken.
    """
    from manyhands.train.inspect import predict_pictures

    for picture in pictures:
        if not picture.is_file():
            raise UserError(f"there is no picture {picture}", "", ("name picture files",))
    job = job_of(reference, {"cluster.device": None})
    yield from predict_pictures(job, resolve_checkpoint(reference, which), pictures)
