"""Tasks other than training: evaluation, prediction, checkpoint tools, plan search and prediction of scaling.

A task runs in this process, in the group that a launcher has formed, or on processes started here. `reference` is a run
folder, a checkpoint, or a .pth.tar, .pth, .pt or .safetensors file. `which` is "best" or "last", for a run folder.
"""

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.checkpoint.describe import is_pickled, open_description
from manyhands.checkpoint.folders import choose_checkpoint
from manyhands.cluster.agents import machines, protocol, ssh, supervise
from manyhands.cluster.failures import Failed, error_of_record
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.hosts.this_process import decide_launch
from manyhands.config.job import OBJECT, Job
from manyhands.config.load import announce, load_job
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.plan_record import read_plan_record
from manyhands.core.run_folder import OBJECTS, RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say
from manyhands.parallel.options import MODE_OF_PLANS, USUAL_MODE, ParallelOptions
from manyhands.run import logs, outcome, train
from manyhands.run.folder import read_network_record

if TYPE_CHECKING:
    from manyhands.worker.plan_growth import Growth
    from manyhands.worker.plan_search import PlannedJob

Guesses = list[tuple[str, float]]
_T = TypeVar("_T")
_ATTEMPTS = 5  # to use a checkpoint, while an active run deletes checkpoints


def evaluate_run(reference: Path, *, which: str, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Evaluates a checkpoint on the run's evaluation split, or on the data that `flags` name.

    `flags` are changes to the run's job, by dotted key. A folder without train/ and val/ is evaluated entirely. Returns
    a dict with checkpoint, data, count, loss, top1, top5, per_class and confusion; None on ranks other than 0.
    """
    from manyhands.worker.launcher import is_unsplit_folder

    job = load_run_job(reference, flags)
    given = [key for key, value in flags.items() if value is not None]
    if job.data.name == OBJECTS:
        hints = ("name a folder of pictures: manyhands eval RUN FOLDER", "or call manyhands.evaluate(MODEL, TEST_SET)")
        raise UserError("the data of this run was a Python object in the training program", str(reference), hints)
    whole = "data.name" in given and is_unsplit_folder(job.data.name)
    trained_on = load_job({}, file=run.job).job.data.name if whole and (run := find_run_folder(reference)) else ""
    if trained_on and Path(trained_on).expanduser().resolve() == Path(job.data.name).expanduser().resolve():
        say(f"{job.data.name} contains training pictures of this run; to evaluate only the evaluation split, omit DATA")

    def evaluate(path: Path) -> dict[str, Any] | None:
        _announce_code(job, path, given)
        return evaluate_job(job, path, given=given, whole=whole)

    return use_checkpoint(reference, which, evaluate)


def _announce_code(job: Job, path: Path, given: Collection[str]) -> None:
    """Prints the code files that are executed because the run's records name them, not the user's flags (`given`)."""
    record = read_network_record(path)
    if "model.name" not in given:
        announce([record.name if record else job.model.name], path, record, "manyhands eval RUN DATA {}")
    if "data.name" not in given:
        announce([job.data.name], path, record, "manyhands eval RUN {}")
    if "train.metrics" not in given:
        announce(job.train.metrics, path, record, "manyhands eval RUN --set train.metrics={}")
    for word in job.train.metrics:
        if word.startswith(f"{OBJECT}:"):
            say(f"skipping the metric {word.removeprefix(f'{OBJECT}:')}, which was a Python object")


def evaluate_job(
    job: Job, path: Path | None, *, given: Collection[str] = (), whole: bool = False
) -> dict[str, Any] | None:
    """Evaluates a checkpoint, or the untrained network if `path` is None, on the job's processes; see `evaluate_run`.

    `given` are keys of options that the user set. With `whole`, all pictures of the folder are evaluated, not a split.
    """
    argument = {"checkpoint": str(path.resolve()) if path else "", "given": list(given), "whole": whole}
    found = _run_task(job, {"task": "evaluate", **argument})
    data = job.data.name if whole else f"the evaluation split of {job.data.name}"
    return {"checkpoint": str(path or ""), **found, "data": data} if found else None


def load_run_job(reference: Path, flags: Mapping[str, Any]) -> Job:
    """Returns the job of a checkpoint's run, changed by `flags`, which must name the data if there is no run folder.

    Only `flags` set machines and processes, because the machines of the run may not be available.
    """
    if not reference.exists():
        hints = ("name a run folder, a checkpoint, or a .pth.tar file",)
        raise UserError(f"there is no file or folder {reference}", "", hints)
    if not (run := find_run_folder(reference)):
        if not flags.get("data.name"):
            hints = ("name data and network: manyhands eval FILE DATA MODEL",)
            raise UserError(f"{reference} is not in a run folder", "", hints)
        return load_job(dict(flags)).job
    job = load_job(dict(flags), file=run.job).job
    changes: dict[str, Any] = {
        "cluster": load_job({key: value for key, value in flags.items() if key.startswith("cluster.")}).job.cluster,
        "data": job.data.model_copy(update={"held_out": ""}),  # the held-out set isn't used here, and may be missing
    }
    if job.parallel.searches and run.plan.is_file():  # follow the plan that the run's processes found
        unsharded = read_plan_record(run.plan).mode == USUAL_MODE
        found = {"mode": USUAL_MODE} if unsharded else {"mode": MODE_OF_PLANS, "plan": str(run.plan)}
        options = ParallelOptions().model_dump(include={"mesh", "pin", "fill"}) | found
        changes["parallel"] = job.parallel.model_copy(update=options)
    return job.model_copy(update=changes)


def find_run_folder(reference: Path) -> RunFolder | None:
    """Returns the run folder that is, or contains, `reference`; None if it is not in a run folder."""
    folders = map(RunFolder, (reference, *reference.absolute().parents[:2]))
    return next((folder for folder in folders if folder.exists()), None)


def use_checkpoint(reference: Path, which: str, use: Callable[[Path], _T]) -> _T:
    """Returns use(path) for a checkpoint. Chooses another checkpoint if an active run deletes the first one.

    Prints which damaged checkpoints are skipped. Raises UserError if none is usable.
    """
    lost = None
    for _ in range(_ATTEMPTS):
        path = resolve_checkpoint(reference, which)
        try:
            return use(path)
        except (ManyhandsError, FileNotFoundError) as error:
            if path.exists() or path.name not in str(error):
                raise
            lost = error
    hints = ("try again", "or keep more checkpoints when you train: --set checkpoint.keep=10")
    raise UserError("the run deleted each chosen checkpoint before it was read", str(reference), hints) from lost


def resolve_checkpoint(reference: Path, which: str) -> Path:
    """Returns a checkpoint's path; see `use_checkpoint`, which also copes with a checkpoint that is deleted later."""
    folder = RunFolder(reference)
    if folder.exists() and not folder.has_checkpoints():
        away = next((place for place in logs.read_log_locations(folder) if place.has_rank(0) and not place.local), None)
        if away:
            what = f"the checkpoints of {reference} are on {away.machine.name}, the machine that ran rank 0"
            there = f"{away.folder}/checkpoints"
            raise UserError(what, f"{away.host}:{there}", (ssh.scp_command(away.machine, there, f"{reference}/"),))
    path, passed_over = choose_checkpoint(reference, which)  # pyright: ignore[reportArgumentType]
    for note in passed_over:
        say(note)
    return path


def predict_files(
    reference: Path,
    pictures: Sequence[Path],
    *,
    which: str = "best",
    model: str | None = None,
    processes: int | None = None,
    device: str | None = None,
) -> Iterator[tuple[Path, Guesses | str]]:
    """Yields (path, guesses) for each picture: its most likely (class, probability) pairs, or an error message.

    `pictures` are files and folders. `model` is the name of the network, if the run doesn't record it. If `processes`
    is None, this process predicts, or the group that a launcher formed. If `device` is None, one process uses the CPU,
    and several processes select a device. Raises UserError if a picture or the network is missing.
    """
    files = list_pictures(pictures)
    job = load_job({"cluster.processes": processes, "cluster.device": device}).job

    def predict(path: Path) -> Iterable[Guesses | str]:
        record = read_network_record(path)
        if model is None and record:
            announce([record.name], path, record, "--model {}")
        if (processes or 1) > 1 or decide_launch(job.cluster).process_info:
            named = [str(file.resolve()) for file in files]
            argument = {"task": "predict", "checkpoint": str(path.resolve()), "pictures": named, "model": model}
            return _run_task(job, argument).get("guesses", ())
        from manyhands.worker.own_process import guess, open_trained

        place = "cpu" if job.cluster.device == "auto" else job.cluster.device
        return guess(open_trained(path, model=model, device=place), files, skip=True)

    if found := use_checkpoint(reference, which, predict):
        yield from zip(files, found, strict=True)


def list_pictures(named: Iterable[Path]) -> list[Path]:
    """Returns the files in `named`, and the pictures below folders in `named`. Raises UserError for no picture."""
    from manyhands.data.decode import PICTURE_SUFFIXES
    from manyhands.data.layout import is_junk

    found: list[Path] = []
    for path in named:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURE_SUFFIXES)
            inside = [file for file in files if file.is_file() and not any(map(is_junk, file.relative_to(path).parts))]
            if not inside:
                hints = (f"name a folder with pictures that end in {', '.join(sorted(PICTURE_SUFFIXES))}",)
                raise UserError(f"there is no picture in {path}", str(path), hints)
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"there is no picture {path}", "", ("name picture files or folders of pictures",))
    return found


def describe_checkpoint(reference: Path, *, which: str) -> dict[str, Any]:
    """Returns a checkpoint's format, step and mesh, and the shape, dtype, sharding and size of each tensor."""

    def describe(path: Path) -> dict[str, Any]:
        if not is_pickled(path):
            return open_description(path, verified=path.is_dir()).as_plain()
        from manyhands.worker.launcher import describe_pickled

        return describe_pickled(path)

    return use_checkpoint(reference, which, describe)


def rewrite_checkpoint(reference: Path, target: Path, *, which: str, plan: Path | None = None) -> tuple[str, ...]:
    """Writes a checkpoint unsharded (as a new folder or a file of weights), or as a folder sharded by a plan.

    Returns a sentence about each omitted part. Raises ManyhandsError if the target exists or the plan doesn't fit.
    """
    from manyhands.worker.launcher import convert_checkpoint

    return convert_checkpoint(functools.partial(use_checkpoint, reference, which), target, plan)


def _run_task(job: Job, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs a task on new processes, or on all ranks of a launcher's process group; only rank 0 returns a result."""
    process_info = train.launch_decision(job).process_info
    if process_info is None:
        return run_by_agent(job, argument)
    from manyhands.worker.entry import run_task

    with _private_folder() as folder:
        try:
            found = run_task(job, process_info, folder, argument, say)
        except Failed as failed:
            raise error_of_record(failed.record) from failed.__cause__
    return found if process_info.rank == 0 else {}


def run_by_agent(job: Job, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs the task `argument["task"]` with the other arguments on new local processes; returns rank 0's result."""
    with _private_folder() as folder:
        here = Rendezvous((job.cluster.processes,))
        orders = protocol.orders_for(job, folder=str(folder.path), rendezvous=here, **argument)
        with closing(machines.open_local_agent(folder.ranks / "agent.log")) as link:
            ending = supervise.supervise_once({link: orders}, supervise.WatchHooks())
        if ending.interrupted:
            raise KeyboardInterrupt  # nothing to save, and the end of a process by the signal is no failure
        if not ending.ok:
            raise outcome.error_of_ending(folder, ending)
        return ending.returned[0]


@contextmanager
def _private_folder() -> Iterator[RunFolder]:
    with scratch("private") as private:
        folder = RunFolder(private)
        folder.failures.mkdir(parents=True)
        yield folder


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection, which slows down a plan search: nearly all of its many objects stay in use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def search_plan(job: Job, requested: Mapping[str, Any], out: Path, *, force: bool) -> "PlannedJob":
    """Searches for the best parallel plan of a job; writes the plan to `out`, and a picture beside it."""
    train.check_names(job)
    from manyhands.worker import plan_search

    return plan_search.search_plan(job, requested, out, run_by_agent, force=force)


@_no_garbage_collection()
def predict_growth(job: Job, first: int, requested: Mapping[str, Any], out: Path | None, *, force: bool) -> "Growth":
    """Predicts a job's throughput, efficiency and cost on `first` and more machines; draws them to the file `out`."""
    from manyhands.report.growth import check_picture_file, draw_growth

    if out is not None:
        check_picture_file(out, force=force)
    from manyhands.worker import plan_growth

    growth = plan_growth.predict_growth(job, first, requested)
    if out is not None:
        draw_growth(growth.rows, growth.title, out)
    return growth
