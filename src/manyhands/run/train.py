"""Starts a training run on this machine and watches it, or trains in this process as one of a group."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import resolve
from manyhands.cluster.agents.assemble import open_here
from manyhands.cluster.agents.connection import AgentConnection, close_all
from manyhands.cluster.agents.early import FILES, FILES_EACH, end_early, raise_file_limit
from manyhands.cluster.agents.orders import Orders, orders_for
from manyhands.cluster.agents.supervise import Watch, supervise_once
from manyhands.cluster.agents.worker_start import attach_notice
from manyhands.cluster.failures import Failed, as_error
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.cluster.hosts.this_process import LaunchDecision, RankOutsideError, participate, refuse_unfollowed
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_INTERRUPTED, UserError
from manyhands.core.files import private_files
from manyhands.core.mesh import parse_mesh
from manyhands.core.resuming import OBJECTS
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.shares import check_batch
from manyhands.core.terminal import say
from manyhands.core.user_code import refuse_no_code
from manyhands.core.world import ProcessInfo
from manyhands.data.known import find_choice
from manyhands.models.published import check_network
from manyhands.parallel.options import check_mode
from manyhands.parallel.ports import describe_exposure, listen
from manyhands.report.screen import Screen
from manyhands.run.folder import FolderWatch, run_folder
from manyhands.run.outcome import (
    Outcome,
    conclude,
    ends_noted,
    interrupted,
    note_cause,
    report_on,
    starts_and_stops,
    with_resume_hint,
)
from manyhands.run.recovery import RestartHooks, run_to_end
from manyhands.run.script import shown, stopping
from manyhands.sync.choose import check_method

STOPPING = "stopping after the current update; press Ctrl-C again to end at once without saving"


def train(job: Job, *, quiet: bool = False, objects: Any = None, rendezvous: Rendezvous | None = None) -> Outcome:
    """Trains as the job says: starts processes here, or joins a group that a launcher formed.

    Args:
        job: what to do.
        quiet: no progress on standard error.
        objects: `train.objects.Objects` of a user of the Python interface.
        rendezvous: this machine among others that each start their own processes; None: from flags and environment.

    Raises:
        ManyhandsError: the run failed; the error describes the first cause.
    """
    decision = LaunchDecision(None, rendezvous=rendezvous) if rendezvous else place_of(job)
    if job.cluster.detach:
        hints = ("use manyhands launch --detach --hosts localhost …", "or remove cluster.detach")
        raise UserError("only manyhands launch can detach a run", "cluster.detach", hints)
    if decision.process_info:
        end_early()
        return train_in_process(job, decision.process_info, quiet=quiet, objects=objects)
    if job.cluster.debugging:
        say(attach_notice(job.cluster))
    rendezvous = decision.rendezvous or Rendezvous((decision.processes,))
    several = len(rendezvous.sizes) > 1
    needed = FILES + FILES_EACH * max(1, decision.processes)
    if (most := raise_file_limit(needed)) < needed:
        hints = (f"raise the limit: ulimit -n {needed}",)
        raise UserError(f"this run opens up to {needed} files per process, but the limit is {most}", "ulimit -n", hints)
    if several:
        job = _among_machines(job, rendezvous, quiet=quiet)
    else:
        _refuse_missing(job, objects)
        rendezvous = Rendezvous(rendezvous.sizes, devices=rendezvous.devices)
    private_folder = scratch("objects") if objects is not None else nullcontext(Path())
    with run_folder(job) as folder, private_folder as private:
        more, earlier = {"met": several, **_hand_over(objects, private)}, len(starts_and_stops(folder))
        with ends_noted(job, folder), closing(Screen(folder.path, quiet=quiet)) as screen:
            watch = watch_on(job, screen, shown(job, folder, screen, quiet=quiet))
            # With one command per machine no launcher watches all processes: none are restarted or evicted.
            watch.evicts &= not several
            agents = list[AgentConnection]()

            def orders(job: Job, number: int) -> dict[AgentConnection, Orders]:
                if not agents or agents[-1].closed:
                    agents.append(open_here(folder.ranks / "agent.log"))
                there = str(folder.path.resolve())
                return {agents[-1]: orders_for(job, "train", there, rendezvous, generation=number, **more)}

            try:
                if several:
                    ending = supervise_once(orders(job, 0), watch)
                else:
                    ending = run_to_end(job, folder, RestartHooks(), orders, watch, screen.say)
            finally:
                close_all(agents)
                watch.on_tick()
        return replace(conclude(job, folder, ending, earlier), is_main=rendezvous.machine == 0)


def trace(job: Job, steps: int, *, quiet: bool) -> Outcome:
    """Trains for some updates on this machine, and writes their trace into a run folder."""
    run = job.run.model_copy(update={"trace_steps": steps, "report": False})
    return train(job.model_copy(update={"run": run}), quiet=quiet)


def check_names(job: Job, *, data: bool = True, model: bool = True) -> None:
    """Looks up the data set, network, mode and method that a job names, without importing torch.

    `data` is False for objects and for folders that may be on another machine only, `model` for objects.

    Raises:
        UserError: one of them doesn't exist, or the batch or the mesh doesn't fit the number of processes.
    """
    if data:
        find_choice(job.data.name)
    if model:
        check_network(job.model.name, pretrained=job.model.pretrained)
    check_mode(job.parallel.mode)
    check_method(job.sync.method)
    count = job.cluster.processes
    if job.parallel.mesh and count and not (job.cluster.hosts or job.cluster.hostfile or job.cluster.world_size):
        parse_mesh(job.parallel.mesh).check_size(count)
    check_batch(job.train.batch, count)


def _refuse_missing(job: Job, objects: Any) -> None:
    """Raises UserError for names and files that don't exist on this machine, before torch is loaded."""
    if job.run.script:
        return
    if job.cluster.device.partition(":")[0] == "gpu":
        hints = (
            "remove --device to detect the accelerator",
            "or use --device cuda (NVIDIA, AMD), npu, xpu, mps or cpu",
        )
        raise UserError("there is no device type gpu", "cluster.device", hints)
    check_names(job, data=job.data.name != OBJECTS, model=getattr(objects, "model", None) is None)
    code = {"data.name": job.data.name, "model.name": job.model.name, "train.loss": job.train.loss}
    for where, word in code.items():
        refuse_no_code(word, where)
    weights = Path(job.model.weights).expanduser()
    resumed = job.run.out and RunFolder(Path(job.run.out).expanduser()).has_checkpoints()
    if not (resumed or weights.exists()):
        resolve(weights, "best")


def place_of(job: Job) -> LaunchDecision:
    """Returns how this process takes part; an invalid rank is published to the waiting processes before this raises.

    Raises:
        UserError: flags or variables contradict each other or are incomplete, or a flag can't be followed.
    """
    try:
        found = participate(job.cluster)
    except RankOutsideError as outside:
        from manyhands.worker.member import publish_invalid_rank

        publish_invalid_rank(job, outside.process_info, outside.message)
        raise
    refuse_unfollowed(job.cluster, found)
    for words, option, value in found.requests:
        section, _, name = option.partition(".")
        if not option:
            say(f"{job.cluster.file}: {words} is not supported and is ignored")
        elif getattr(getattr(job, section), name) != value:
            say(f"{job.cluster.file}: {words} is ignored; to apply this setting, add --{option} {value}")
    return found


def _among_machines(job: Job, rendezvous: Rendezvous, *, quiet: bool) -> Job:
    """Returns this machine's part of a job with one command per machine; rank 0's machine keeps the run folder."""
    if rendezvous.machine:
        out = f"{job.run.out}.node{rendezvous.machine}" if job.run.out else ""
        return job.model_copy(update={"run": job.run.model_copy(update={"out": out, "report": False})})
    if not rendezvous.file:
        # The agent opens the port; here it is only checked before it is announced.
        listen(rendezvous.address, rendezvous.port, "MASTER_ADDR and MASTER_PORT, or the cluster file").close()
        if not quiet:
            say(describe_exposure(rendezvous.address, rendezvous.port))
    return job


def _hand_over(objects: Any, private: Path) -> dict[str, Any]:
    """Writes the user's live objects to a folder that only this user can read."""
    if objects is None:
        return {}
    import cloudpickle

    path = private / "objects"
    path.write_bytes(cloudpickle.dumps(objects))
    return {"objects": str(path), "paths": [entry or str(Path.cwd()) for entry in sys.path]}


def watch_on(job: Job, screen: Screen, on_tick: Callable[[], None]) -> Watch:
    """Returns the callbacks by which supervision updates the screen and follows the run folder."""
    folder = FolderWatch(screen.folder, lambda text: screen.say(text, "WARNING"))

    def tick() -> None:
        folder.look()
        on_tick()

    return Watch(
        tick,
        lambda: screen.say(stopping(job, STOPPING)),
        lambda how: screen.say(how, "WARNING"),
        stalls=not job.cluster.debugging,
        evicts=job.cluster.recovers,
    )


def train_in_process(job: Job, process_info: ProcessInfo, *, quiet: bool, objects: Any) -> Outcome:
    """Trains in this process, as one of a group (torchrun, --init) or alone from Python."""
    # Errors that torch's C++ parts log, with fifty lines of addresses each, are raised as exceptions as well.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if process_info.rank:
        # Under a launcher only rank 0 prints.
        notify = say if process_info.started_by == "--init" else lambda _text: None
        with private_files():
            result = _take_part(job, process_info, NOWHERE, objects, notify)
        return Outcome(RunFolder(Path(result["folder"])), result["status"], is_main=False)
    with run_folder(job) as folder:
        screen, over = Screen(folder.path, quiet=quiet), threading.Event()
        thread = threading.Thread(target=_draw, args=(screen, over), daemon=True)
        thread.start()
        try:
            result = _take_part(job, process_info, folder, objects, say)
        finally:
            over.set()
            thread.join(5)
            screen.update()
            screen.close()
        report_on(job, folder)
        return Outcome(folder, result["status"])


def _draw(screen: Screen, over: threading.Event) -> None:
    """Draws the screen from the run folder while this process trains."""
    folder = FolderWatch(screen.folder, lambda text: screen.say(text, "WARNING"))
    while not over.wait(0.25):
        folder.look()
        with suppress(OSError):
            screen.update()


def _take_part(
    job: Job, process_info: ProcessInfo, folder: RunFolder, objects: Any, notify: Callable[[str], None]
) -> dict[str, Any]:
    from manyhands.worker.entry import train_here

    try:
        return train_here(job, process_info, folder, {"live": objects}, notify)
    except Failed as failed:
        if process_info.rank == 0:
            note_cause(folder, failed.record)
            if failed.record.exit_code == EXIT_INTERRUPTED:
                raise interrupted(folder) from None
        error = as_error(failed.record)
        raise (error if process_info.rank else with_resume_hint(error, folder)) from failed.__cause__
