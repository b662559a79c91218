"""Evaluates what a run has learnt, and runs other short tasks of workers."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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
from manyhands.run.worker import Failed, as_error, evaluate_here, predict_here

# The name of data that the user of the Python interface brings as objects.
OBJECTS = "objects"


def evaluate_run(reference: Path, *, which: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates a run's checkpoint, or a file: on the split that the run evaluated, or on the data that flags name.

    A plain folder of class folders is evaluated whole.

    Args:
        reference: a run folder, a checkpoint, or a .pth.tar, .pth or .safetensors file.
        which: "best" or "last", for a run folder.
        flags: changes to the run's job, by dotted key.

    Returns:
        checkpoint, data, count, loss, top1, top5, per_class and confusion, as plain data.

    Raises:
        ManyhandsError: there is no such run, or the evaluation failed.
    """
    from manyhands.data.open import is_plain_folder

    job, path = job_of(reference, flags), resolve_checkpoint(reference, which)
    if job.data.name == OBJECTS:
        mend = ("name a folder of pictures: manyhands eval RUN FOLDER", "or manyhands.evaluate(NETWORK, TEST_SET)")
        raise UserError("this run's data were objects in Python, which only that program has", str(reference), mend)
    given = [key for key, value in flags.items() if value is not None]
    whole = "data.name" in given and is_plain_folder(job.data.name)
    if whole and _is_own_data(reference, job.data.name):
        _say(f"{job.data.name} is what this run was trained on, most of it; without it the held-back part is evaluated")
    found = _evaluate(job, path, {"given": given, "whole": whole})
    return {**found, "data": job.data.name if whole else f"the evaluation split of {job.data.name}"}


def _is_own_data(reference: Path, name: str) -> bool:
    """True where a folder is the one that the run was trained on."""
    run = run_of(reference)
    trained_on = load_job({}, file=run.job).job.data.name if run else ""
    return bool(trained_on) and Path(trained_on).expanduser().resolve() == Path(name).expanduser().resolve()


def evaluate_job(job: Job, path: Path | None) -> dict[str, Any] | None:
    """Evaluates a checkpoint, or the network as the job makes it, on the processes that the job names.

    Returns:
        What `evaluate_run` does; None on processes other than the first.

    Raises:
        ManyhandsError: the evaluation failed.
    """
    found = _evaluate(job, path, {})
    return {**found, "data": f"the evaluation split of {job.data.name}"} if found else None


def _evaluate(job: Job, path: Path | None, more: dict[str, Any]) -> dict[str, Any]:
    """What was found; empty on processes other than the first."""
    found = take_part_or_start(job, "evaluate", {"checkpoint": str(path.resolve()) if path else "", **more})
    return {"checkpoint": str(path or ""), **found} if found else {}


def take_part_or_start(job: Job, task: Literal["evaluate", "predict"], argument: dict[str, Any]) -> dict[str, Any]:
    """Does a worker's task in this process, where a launcher made it one of a group, else in processes of our own.

    Returns:
        What the task returned; nothing on processes of a group other than the first.

    Raises:
        ManyhandsError: the task failed.
    """
    membership = participate(job.cluster).membership
    if membership is None:
        return run_by_agent(job, {"task": task, **argument})
    work = {"evaluate": evaluate_here, "predict": predict_here}[task]
    with _private_folder() as folder:
        try:
            found = work(job, membership, folder, argument, _say)
        except Failed as failed:
            raise as_error(failed.record) from failed.__cause__
    return found if membership.rank == 0 else {}


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
    """The job that a checkpoint belongs to, with changes; for a lone file the flags must name the data.

    Which machines and processes take part is this user's to say now: the run's own may be far away.
    """
    if not reference.exists():
        raise UserError(
            f"there is nothing at {reference}", "", ("name a run folder, a checkpoint, or a .pth.tar file",)
        )
    run = run_of(reference)
    if run:
        here = load_job({key: value for key, value in flags.items() if key.startswith("cluster.")}).job.cluster
        job = load_job(dict(flags), file=run.job).job.model_copy(update={"cluster": here})
        return _following(job, run)
    if not flags.get("data.name"):
        raise UserError(
            f"{reference} is in no run folder, so the data must be named", "", ("manyhands eval FILE DATA MODEL",)
        )
    return load_job(dict(flags)).job


def run_of(reference: Path) -> RunFolder | None:
    """The run folder that a checkpoint lies in, or that is meant itself."""
    folders = map(RunFolder, (reference, *reference.absolute().parents[:2]))
    return next((folder for folder in folders if folder.exists()), None)


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
