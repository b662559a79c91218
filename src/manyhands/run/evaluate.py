"""Evaluates what a run has learnt, and finds the job and the checkpoint that are meant."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import choose
from manyhands.cluster.agents.ssh import copied_by
from manyhands.config.job import OBJECT, Job
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.plan_record import read_plan_record
from manyhands.core.resuming import OBJECTS
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import say
from manyhands.core.user_code import announce
from manyhands.parallel.options import MODE_OF_PLANS, USUAL_MODE, ParallelOptions
from manyhands.run.load import load_worker
from manyhands.run.logs import read_places
from manyhands.run.own_code import record_of
from manyhands.run.task import take_part_or_start


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
    job, path = job_of(reference, flags), resolve_checkpoint(reference, which)
    _announce_code(job, path, {key for key, value in flags.items() if value is not None})
    if job.data.name == OBJECTS:
        hints = ("name a folder of pictures: manyhands eval RUN FOLDER", "or call manyhands.evaluate(MODEL, TEST_SET)")
        raise UserError("the data of this run was a Python object of its own program", str(reference), hints)
    given = [key for key, value in flags.items() if value is not None]
    whole = "data.name" in given and load_worker("check").is_plain_folder(job.data.name)
    if whole and _is_own_data(reference, job.data.name):
        say(f"{job.data.name} contains training pictures of this run; to evaluate held-back pictures only, omit DATA")
    found = _evaluate(job, path, {"given": given, "whole": whole})
    return {**found, "data": job.data.name if whole else f"the evaluation split of {job.data.name}"}


def _announce_code(job: Job, path: Path, given: Collection[str]) -> None:
    """Says which code of the run's is about to run; what the user has named now is his own affair."""
    record = record_of(path)
    if "model.name" not in given:
        announce([record.name if record else job.model.name], path, record, "manyhands eval RUN DATA {}")
    if "data.name" not in given:
        announce([job.data.name], path, record, "manyhands eval RUN {}")
    if "train.metrics" not in given:
        announce(job.train.metrics, path, record, "manyhands eval RUN --set train.metrics={}")
    for word in job.train.metrics:
        if word.startswith(f"{OBJECT}:"):
            say(f"skipping the metric {word.removeprefix(f'{OBJECT}:')}, which was a Python object")


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
        job = load_job(dict(flags), file=run.job).job
        # What was held out isn't what an evaluation is of, and needn't be here.
        data = job.data.model_copy(update={"held_out": ""})
        job = job.model_copy(update={"cluster": here, "data": data})
        return _following(job, run)
    if not flags.get("data.name"):
        raise UserError(
            f"{reference} is in no run folder", "", ("name data and network: manyhands eval FILE DATA MODEL",)
        )
    return load_job(dict(flags)).job


def run_of(reference: Path) -> RunFolder | None:
    """The run folder that a checkpoint lies in, or that is meant itself."""
    folders = map(RunFolder, (reference, *reference.absolute().parents[:2]))
    return next((folder for folder in folders if folder.exists()), None)


def _following(job: Job, folder: RunFolder) -> Job:
    """The job of a run whose processes searched for a plan, following the one that they found."""
    if not job.parallel.searches or not folder.plan.is_file():
        return job
    record = read_plan_record(folder.plan)
    whole = record.mode == USUAL_MODE
    found = {"mode": USUAL_MODE} if whole else {"mode": MODE_OF_PLANS, "plan": str(folder.plan)}
    options = ParallelOptions().model_dump(include={"mesh", "pin", "fill"}) | found
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=options)})


def resolve_checkpoint(reference: Path, which: str) -> Path:
    """The checkpoint folder or file that is meant; says which damaged ones were passed over for it.

    Raises:
        UserError: there is none, or it lies on another machine.
    """
    folder = RunFolder(reference)
    if folder.exists() and not folder.has_checkpoints():
        away = next((place for place in read_places(folder) if place.has(0) and not place.local), None)
        if away:
            raise UserError(
                f"the checkpoints of {reference} are on {away.machine.name}, where rank 0 ran",
                f"{away.host}:{away.folder}/checkpoints",
                (copied_by(away.machine, f"{away.folder}/checkpoints", f"{reference}/"),),
            )
    path, passed_over = choose(reference, which)  # pyright: ignore[reportArgumentType]
    for note in passed_over:
        say(note)
    return path
