"""The entry point of worker processes, and the imports that run before workers are forked."""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.options import CheckpointOptions
from manyhands.cluster.agents.folders import has_working_agents
from manyhands.cluster.agents.protocol import Orders
from manyhands.cluster.agents.worker_start import begin_worker, wait_for_debugger, worker_process_info
from manyhands.cluster.failures import Failed
from manyhands.config.job import Job
from manyhands.core import terminal
from manyhands.core.errors import EXIT_FAILED, RunError
from manyhands.core.files import private_files
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import exit_if_hung
from manyhands.core.world import ProcessInfo
from manyhands.data.known import is_published
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE, emergency_save_path
from manyhands.parallel.options import USUAL_MODE
from manyhands.train.journal import Journal, RunContext
from manyhands.train.objects import Objects
from manyhands.worker.member import MET, OUR_HEAD, GroupMember, Say, share_folder, shared_options
from manyhands.worker.run_metadata import write_metadata

NUMBERS = 10_000  # values in the doctor's all-reduce: more than fit into a packet, few enough for a slow link


def work(orders: Orders, scratch: str, agent: int) -> dict[str, Any]:
    """Runs the task in `orders`. `scratch`: the agent's folder for records. `agent`: process id of the agent."""
    argument = {**begin_worker(orders, scratch, agent), "generation": orders.generation}
    job = Job.model_validate(argument["job"])
    folder = RunFolder(Path(argument["folder"]))
    process_info = worker_process_info(job.cluster, orders.rendezvous.file)
    # The user's objects are imported from the same folders as in the user's process.
    found = argument.get("paths", [])
    sys.path[:] = [*found, *(path for path in sys.path if path not in found)]
    notify = terminal.say
    if argument.get("met"):
        process_info = replace(process_info, started_by=MET)
        # The launcher on this machine shows the records of the run folder.
        notify = functools.partial(Journal(folder, 0).event, "note") if process_info.local_rank == 0 else terminal.say
    try:
        with private_files():
            return run_task(job, process_info, folder, argument, notify)
    except Failed as failed:
        raise SystemExit(failed.record.exit_code) from None


def run_training(
    job: Job, process_info: ProcessInfo, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Joins the process group, builds the trainer, trains, and leaves the group. Records errors, and raises Failed."""
    mine = GroupMember(process_info, folder, "build")
    with exit_if_hung(mine.hang_reason, mine.print_unsaved):
        try:
            world = mine.join(job, shared_options(job), say).world
            if process_info.started_by not in {OUR_HEAD, MET}:
                mine.folder = share_folder(world, folder)
            wait_for_debugger(world.rank, world.size, job.cluster)
            job = _with_rank_0_resume(job, world, say)
            trainer = mine.trainer = _build_trainer(job, mine.folder, world, argument)
            from manyhands.train.loop import fit

            with nullcontext() if job.cluster.debugging else mine.liveness_checked():
                status = fit(trainer)
            step = trainer.progress.step
            trainer.journal.event(status, f"stopped and saved at step {step}" if status == "stopped" else "", step)
            return {"status": status, "step": step, "folder": str(mine.folder.path)}
        except BaseException as error:
            if has_working_agents(folder.ranks, argument.get("generation", sys.maxsize)):
                raise SystemExit(EXIT_FAILED) from error
            record = mine.record_failure(error)
            if record.exit_code == EXIT_FAILED and job.cluster.recovers:
                _save_before_restart(mine, consequence=record.consequence)
            if mine.trainer and isinstance(error, Exception):
                mine.trainer.saver.wait()
            raise Failed(record) from error
        finally:
            mine.release_resources()


def _save_before_restart(member: GroupMember, *, consequence: bool) -> None:
    """Saves the training state before a restart. `consequence`: True if another process failed first."""
    from manyhands.train.saving import rescue

    # On an accelerator, an aborted collective doesn't stop the update, so the parameters may be wrong.
    world = member.trainer.world if member.trainer else None
    if not world or (consequence and world.device != "cpu" and world.backend != "gloo"):
        return
    if HEARTBEAT_FILE in os.environ:  # makes the agent wait for the save
        emergency_save_path(Path(os.environ[HEARTBEAT_FILE]).parent, member.process_info.rank).touch()
    member.trainer.saver.wait()
    try:
        if rescue(member.trainer):
            member.trainer.journal.line(f"saved step {member.trainer.progress.step} for the restart")
    except Exception as error:  # noqa: BLE001 - also from the user's state_dict(); the first failure is raised
        member.trainer.journal.line(f"could not save for the restart: {error}")


def _with_rank_0_resume(job: Job, world: Any, say: Say) -> Job:
    """Replaces the job's checkpoint.resume by rank 0's, because rank 0 reads and sends the state. A collective."""
    from manyhands.parallel.group.plain import broadcast_plain

    own = job.checkpoint.resume
    shared = broadcast_plain(own, world)
    if own not in {shared, CheckpointOptions().resume}:
        say(f"--resume {own} of rank {world.rank} is ignored: all ranks use rank 0's --resume {shared}")
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": shared})})


def _build_trainer(job: Job, folder: RunFolder, world: Any, argument: dict[str, Any]) -> Any:
    from manyhands.parallel.apply import follows_plan, resolve_mode
    from manyhands.train.build import build
    from manyhands.train.choose_sync import check_sync_and_mode
    from manyhands.train.parts import Parts
    from manyhands.train.saver import writers_of

    mode = resolve_mode(job.parallel.mode, world)
    check_sync_and_mode(job.sync.method, mode)
    journal = Journal(folder, world.rank)
    if world.is_main:
        journal.event("started", processes=world.size, device=world.device, backend=world.backend, mode=mode)
        if world.device == "cpu" and job.cluster.device == "auto":
            from manyhands.cluster.doctor.accelerators import explain_unused_here

            if reason := explain_unused_here():
                text = f"{reason[0]}: training on the CPU (do: {reason[1][0]}; or set --device cpu)"
                journal.event("warning", text)
    objects = load_objects(argument)
    precision, announced = None, False
    if job.train.measured_precision:
        precision, announced = _resolve_precision(job, folder, world, mode, objects)
        job = precision.job
    followed, about = None, dict[str, Any]()
    if follows_plan(mode) and not world.alone and job.parallel.searches:
        from manyhands.worker.plan_search import select_run_plan

        followed, about = select_run_plan(job, world, folder, objects)
        mode = mode if followed else USUAL_MODE
    elif follows_plan(mode):
        from manyhands.parallel.plan import broadcast_plan

        followed = broadcast_plan(job.parallel, world)
    splits = precision.splits if precision else None
    trainer = build(Parts.from_job(job, folder, world, mode, objects, followed, splits, header=not announced))
    trainer.saver.writers = writers_of(folder, world, in_pieces=job.checkpoint.pieces and bool(trainer.network.layouts))
    notes = (*(precision.reasons if precision else ()), *about.get("untimed", ()), about.get("reason"))
    for note in filter(None, notes):
        trainer.journal.event("note", note)
    write_metadata(trainer, {**about, **(precision.plan_fields if precision else {})})
    return trainer


def _resolve_precision(job: Job, folder: RunFolder, world: Any, mode: str, objects: Any) -> tuple[Any, bool]:
    """Returns the resolved precision, and True if data and network were already recorded before a measurement."""
    from manyhands.train.data_setup import class_names
    from manyhands.train.parts import record_setup
    from manyhands.train.precision import resolve_precision

    announced, run = list[str](), RunContext(job, folder, world, Journal(folder, world.rank), mode)

    def announce(measurement: Any, text: str) -> None:
        splits, names = measurement.splits, class_names(job, measurement.splits)
        record_setup(run, objects, splits, names, measurement.network())
        run.journal.event("note", text)
        announced.append(text)

    return resolve_precision(job, folder, world, mode, objects, say=announce), bool(announced)


def load_objects(argument: dict[str, Any]) -> Objects:
    """Returns the user's Python objects, from a pickle file or as passed in this process."""
    path = argument.get("objects")
    if not path:
        return argument.get("live") or Objects()
    import cloudpickle

    return cloudpickle.loads(Path(path).read_bytes())


def _evaluate(job: Job, world: Any, argument: dict[str, Any]) -> dict[str, Any]:
    from manyhands.train.trained import evaluate_checkpoint

    path = Path(argument["checkpoint"]) if argument["checkpoint"] else None
    given, whole = argument.get("given", ()), bool(argument.get("whole"))
    return evaluate_checkpoint(job, path, world, load_objects(argument), given=given, whole=whole)


def _predict(_job: Job, world: Any, argument: dict[str, Any]) -> dict[str, Any]:
    from manyhands.train.trained import guess_together, open_trained

    trained = open_trained(Path(argument["checkpoint"]), model=argument["model"], device=world.device)
    return {"guesses": guess_together(trained, argument["pictures"], world)}


def _try_plans(job: Job, world: Any, argument: dict[str, Any]) -> dict[str, Any]:
    from manyhands.worker.plan_search import run_plan_task

    return run_plan_task(job, world, argument)


def _check_all_reduce(_job: Job, world: Any, argument: dict[str, Any]) -> dict[str, Any]:
    """Runs the doctor's all-reduce. Returns the seconds since the start. Raises RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    numbers = torch.full((NUMBERS,), float(world.rank + 1), device=world.device)
    if not world.alone:
        dist.all_reduce(numbers)
    expected = world.size * (world.size + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"the all-reduce over all processes returned {numbers[0].item()}, expected {expected}")
    return {"seconds": time.monotonic() - argument["joining_since"]}


# By task: (function, phase in failure records). A phase of None stands for the action: links, measure or verify.
_TASKS: dict[str, tuple[Callable[[Job, Any, dict[str, Any]], dict[str, Any]], str | None]] = {
    "evaluate": (_evaluate, "evaluate"),
    "predict": (_predict, "predict"),
    "plan": (_try_plans, None),
    "add-up": (_check_all_reduce, "doctor"),
}


def run_task(
    job: Job, process_info: ProcessInfo, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Joins the process group, runs `argument["task"]`, and leaves the group. Records errors, and raises Failed."""
    if argument["task"] == "train":
        return run_training(job, process_info, folder, argument, say)
    function, phase = _TASKS[argument["task"]]
    mine = GroupMember(process_info, folder, phase or argument["action"])
    argument = {**argument, "joining_since": time.monotonic()}
    try:
        return function(job, mine.join(job, shared_options(job), say).world, argument)
    except (Exception, KeyboardInterrupt) as error:
        raise Failed(mine.record_failure(error)) from error
    finally:
        mine.release_resources()


def import_training() -> None:
    """Imports the modules that every training worker needs."""
    needed = ("train.build", "train.loop", "worker.run_metadata", f"parallel.modes.{USUAL_MODE}")
    for name in needed:
        importlib.import_module(f"manyhands.{name}")


def preload(orders: Orders | None = None) -> None:
    """Imports the modules for training and, if workers may need them, the precision measurement and torchvision.

    torchvision takes as long as torch, because it imports torch's compiler. Meanwhile, a thread opens the data if it is
    a built-in data set, such as cifar10. Raises RunError if torchvision can't be imported.
    """
    job = Job.model_validate(orders.argument["job"]) if orders else None
    with ThreadPoolExecutor(1, "opens the data") as pool:
        named = orders and orders.argument["task"] == "train" and not orders.argument.get("objects")
        if job and named and is_published(job.data.name) and not job.data.held_out:
            pool.submit(importlib.import_module("manyhands.data.open").open_ahead, job.data)
        import_training()
        if job is None or job.train.measured_precision:
            importlib.import_module("manyhands.train.precision")
        if orders is None or job is None or not _needs_no_torchvision(orders, job):
            try:
                importlib.import_module("torchvision")
            except Exception as error:
                from manyhands.cluster.doctor.facts import torchvision_import_error

                what = torchvision_import_error() or f"torchvision can't be imported: {type(error).__name__}: {error}"
                raise RunError(what, sys.executable, ("run manyhands doctor to see what to install",)) from error


def _needs_no_torchvision(orders: Orders, job: Job) -> bool:
    """Returns True for a built-in network, data set and optimizer, with gradients averaged in shared memory."""
    from manyhands.models.build import is_built_in

    own = is_built_in(job.model.name) and is_published(job.data.name) and job.train.built_in and not job.train.compile
    in_shared_memory = job.parallel.mode == USUAL_MODE and job.parallel.shared_memory
    return orders.argument["task"] == "train" and own and in_shared_memory and len(orders.rendezvous.sizes) == 1
