"""Starts and monitors a run or a user's script on this machine, or trains in this process as one rank of a group."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.folders import find_checkpoint
from manyhands.cluster.agents import connection, early, machines, protocol, supervise, worker_start
from manyhands.cluster.failures import Failed, error_of_record
from manyhands.cluster.hosts import this_process
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.job import Job
from manyhands.config.load import LoadedJob
from manyhands.core import files, mesh, terminal, user_code
from manyhands.core.errors import EXIT_INTERRUPTED, UserError
from manyhands.core.run_folder import NOWHERE, OBJECTS, RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.world import ProcessInfo, check_batch
from manyhands.data.known import find_choice
from manyhands.models.published import check_network
from manyhands.parallel.group.ports import describe_reachability, listen
from manyhands.parallel.options import check_mode
from manyhands.report.screen import Screen
from manyhands.run.folder import FolderWatch, run_folder
from manyhands.run.outcome import Outcome, conclude, record_local_failure, recording_errors, report_on, starts_and_stops
from manyhands.run.recovery import RestartHooks, run_to_end
from manyhands.sync.choose import check_method

STOPPING = "stopping after the current update; press Ctrl-C again to end at once without saving"
_SCRIPT_SECTIONS = ("cluster.", "run.")  # the sections of a job that apply to a script


def train(job: Job, *, quiet: bool = False, objects: Any = None, rendezvous: Rendezvous | None = None) -> Outcome:
    """Trains a job: starts processes on this machine, or joins the group that a launcher formed.

    `objects` are the `train.objects.Objects` of a Python user. `rendezvous` connects machines that each start their own
    processes; if it is None, flags and environment decide. Raises ManyhandsError if the run failed.
    """
    decision = this_process.LaunchDecision(None, rendezvous=rendezvous) if rendezvous else launch_decision(job)
    if job.cluster.detach:
        hints = ("use manyhands launch --detach --hosts localhost …", "or remove cluster.detach")
        raise UserError("only manyhands launch can detach a run", "cluster.detach", hints)
    if decision.process_info:
        early.kill_unused_agent()
        return train_in_process(job, decision.process_info, quiet=quiet, objects=objects)
    if job.cluster.debugging:
        terminal.say(worker_start.attach_notice(job.cluster))
    rendezvous = decision.rendezvous or Rendezvous((decision.processes,))
    several = len(rendezvous.sizes) > 1
    needed = early.FILES + early.FILES_EACH * max(1, decision.processes)
    if (most := early.raise_file_limit(needed)) < needed:
        hints = (f"raise the limit: ulimit -n {needed}",)
        raise UserError(f"this run opens up to {needed} files per process, but the limit is {most}", "ulimit -n", hints)
    if several:
        job = _job_of_machine(job, rendezvous, quiet=quiet)
    else:
        refuse_missing(job, objects)
        rendezvous = Rendezvous(rendezvous.sizes, devices=rendezvous.devices)
    private_folder = scratch("objects") if objects is not None else nullcontext(Path())
    with run_folder(job) as folder, private_folder as private:
        more, earlier = {"met": several, **_pickle_objects(objects, private)}, len(starts_and_stops(folder))
        with recording_errors(job, folder), closing(Screen(folder.path, quiet=quiet)) as screen:
            watch = watch_hooks(job, folder, screen, quiet=quiet)
            watch.recovers &= not several  # no launcher watches all processes: none are restarted
            agents, there = list[connection.AgentConnection](), str(folder.path.resolve())

            def orders(job: Job, number: int) -> dict[connection.AgentConnection, protocol.Orders]:
                if not agents or agents[-1].closed:
                    agents.append(machines.open_local_agent(folder.ranks / "agent.log"))
                order = protocol.orders_for(job, "train", there, rendezvous, **more)
                return {agents[-1]: replace(order, generation=number)}

            try:
                if several:
                    ending = supervise.supervise_once(orders(job, 0), watch)
                else:
                    ending = run_to_end(job, folder, RestartHooks(), orders, watch, screen.say)
            finally:
                connection.close_all(agents)
                watch.on_tick()
        return replace(conclude(job, folder, ending, earlier), is_main=rendezvous.machine == 0)


def trace_training(job: Job, steps: int, *, quiet: bool) -> Outcome:
    run = job.run.model_copy(update={"trace_steps": steps, "report": False})
    return train(job.model_copy(update={"run": run}), quiet=quiet)


def check_names(job: Job, *, data: bool = True, model: bool = True) -> None:
    """Raises UserError if the mode, sync method, data set (with `data`) or network (with `model`) is unknown."""
    if data:
        find_choice(job.data.name)
    if model:
        check_network(job.model.name, pretrained=job.model.pretrained)
    check_mode(job.parallel.mode)
    check_method(job.sync.method)
    count = job.cluster.processes
    if job.parallel.mesh and count and not (job.cluster.hosts or job.cluster.hostfile or job.cluster.world_size):
        mesh.parse_mesh(job.parallel.mesh).check_size(count)
    check_batch(job.train.batch, count)


def refuse_missing(job: Job, objects: Any = None) -> None:
    """Raises UserError for names and files that don't exist on this machine, before torch is loaded."""
    if job.run.script:
        return
    if job.cluster.device.partition(":")[0] == "gpu":
        how = ("remove --device to detect the accelerator", "or use --device cuda (NVIDIA, AMD), npu, xpu, mps or cpu")
        raise UserError("there is no device type gpu", "cluster.device", how)
    check_names(job, data=job.data.name != OBJECTS, model=getattr(objects, "model", None) is None)
    for key, word in {"data.name": job.data.name, "model.name": job.model.name, "train.loss": job.train.loss}.items():
        user_code.refuse_missing_code(word, key)
    weights = Path(job.model.weights).expanduser()
    resumed = job.run.out and RunFolder(Path(job.run.out).expanduser()).has_checkpoints()
    if not (resumed or weights.exists()):
        find_checkpoint(weights, "best")


def launch_decision(job: Job) -> this_process.LaunchDecision:
    """Determines whether this process is a rank or a launcher. Reports an invalid rank to peers. Raises UserError."""
    try:
        found = this_process.decide_launch(job.cluster)
    except this_process.RankOutsideError as outside:
        from manyhands.worker.member import publish_invalid_rank

        publish_invalid_rank(job, outside.process_info, outside.message)
        raise
    this_process.refuse_contradicted_flags(job.cluster, found)
    for words, option, value in found.requests:
        section, _, name = option.partition(".")
        if not option:
            terminal.say(f"{job.cluster.file}: {words} is not supported and is ignored")
        elif getattr(getattr(job, section), name) != value:
            terminal.say(f"{job.cluster.file}: {words} is ignored; to apply this setting, add --{option} {value}")
    return found


def _job_of_machine(job: Job, rendezvous: Rendezvous, *, quiet: bool) -> Job:
    """Returns the job for this machine if the user runs the command on each one. Only rank 0's uses the run folder."""
    if rendezvous.machine:
        out = f"{job.run.out}.node{rendezvous.machine}" if job.run.out else ""
        return job.model_copy(update={"run": job.run.model_copy(update={"out": out, "report": False})})
    if not rendezvous.file:
        # The agent opens the port; here it is only checked before it is announced.
        listen(rendezvous.address, rendezvous.port, "MASTER_ADDR, MASTER_PORT or the cluster file").close()
        if not quiet:
            terminal.say(describe_reachability(rendezvous.address, rendezvous.port))
    return job


def _pickle_objects(objects: Any, private: Path) -> dict[str, Any]:
    """Pickles the user's Python objects into a private folder; returns the file and sys.path as fields of `Orders`."""
    if objects is None:
        return {}
    import cloudpickle

    path = private / "objects"
    path.write_bytes(cloudpickle.dumps(objects))
    return {"objects": str(path), "paths": [entry or str(Path.cwd()) for entry in sys.path]}


def watch_hooks(job: Job, folder: RunFolder, screen: Screen, *, quiet: bool) -> supervise.WatchHooks:
    def warn(text: str) -> None:
        screen.say(text, "WARNING")

    followed, script = FolderWatch(folder.path, warn), job.run.script
    echo = ScriptOutput(folder.ranks / "0.log") if script and not quiet else None

    def tick() -> None:
        followed.check()
        screen.update()
        if echo:
            echo.show_new()

    # A script may not save.
    stopping = f"stopping {script[0]}; press Ctrl-C again to kill the script" if script else STOPPING
    stalls, recovers = not job.cluster.debugging, job.cluster.recovers
    return supervise.WatchHooks(tick, lambda: screen.say(stopping), warn, stalls=stalls, recovers=recovers)


class ScriptOutput:
    """Copies the output of a user's script on rank 0, unchanged, from its log file to standard output."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._shown = log.stat().st_size if log.is_file() else 0

    def show_new(self) -> None:
        end = self._log.stat().st_size if self._log.is_file() else 0  # a script may write without a pause
        while self._shown < end and (new := files.read_new_lines(self._log, self._shown, 1 << 20, unfinished=True)):
            self._shown += len(new)
            sys.stdout.flush()
            files.write_all(sys.stdout.fileno(), new)


def check_script(loaded: LoadedJob) -> None:
    """Raises UserError if the script is missing, an option doesn't apply to scripts, or a launcher set a rank."""
    job, script = loaded.job, loaded.job.run.script[0]
    given = [key for key, origin in loaded.origins.items() if origin == "flag" and not key.startswith(_SCRIPT_SECTIONS)]
    if given:
        hints = (f"put options of the script after --: manyhands train {script} -n 2 -- --its-own-option 3",)
        raise UserError(f"{given[0]} has no effect on a script of your own", f"flag --{given[0]}", hints)
    if not this_process.machines_of(job.cluster) and not Path(script).is_file():
        raise UserError(f"there is no script {script}", str(Path.cwd()), ("write the path relative to this folder",))
    if found := this_process.decide_launch(job.cluster).process_info:
        what = f"this process is already rank {found.rank} of {found.size}, as set by {found.started_by}"
        hints = (f"start {script} without manyhands", f"or without a launcher: manyhands train {script} -n 2")
        raise UserError(what, script, hints)


def train_in_process(job: Job, process_info: ProcessInfo, *, quiet: bool, objects: Any) -> Outcome:
    """Trains in this process, alone or as one rank of a group (torchrun, --init)."""
    # torch's C++ code logs errors with stack traces of 50 lines, but raises them as exceptions too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if process_info.rank:
        # Under a launcher only rank 0 prints.
        notify = terminal.say if process_info.started_by == "--init" else lambda _text: None
        with files.private_files():
            result = _train_rank(job, process_info, NOWHERE, objects, notify)
        return Outcome(RunFolder(Path(result["folder"])), result["status"], is_main=False)
    with run_folder(job) as folder:
        screen, over = Screen(folder.path, quiet=quiet), threading.Event()
        on_tick = watch_hooks(job, folder, screen, quiet=quiet).on_tick

        def draw() -> None:
            while not over.wait(0.25):
                with suppress(OSError):
                    on_tick()

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            result = _train_rank(job, process_info, folder, objects, terminal.say)
        finally:
            over.set()
            thread.join(5)
            screen.update()
            screen.close()
        report_on(job, folder)
        return Outcome(folder, result["status"])


def _train_rank(
    job: Job, process_info: ProcessInfo, folder: RunFolder, objects: Any, notify: Callable[[str], None]
) -> dict[str, Any]:
    from manyhands.worker.entry import run_training

    try:
        return run_training(job, process_info, folder, {"live": objects}, notify)
    except Failed as failed:
        cause = None if failed.record.exit_code == EXIT_INTERRUPTED else failed.__cause__
        record = failed.record
        raise (error_of_record(record) if process_info.rank else record_local_failure(folder, record)) from cause
