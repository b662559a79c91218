"""What each process of a run does. The only module of `run` whose functions import torch."""

import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from manyhands import __version__
from manyhands.checkpoint.options import CheckpointOptions
from manyhands.cluster.rendezvous import worker_membership
from manyhands.config.job import ClusterOptions, Job
from manyhands.core.errors import EXIT_USAGE, ManyhandsError, RunError, UserError
from manyhands.core.folder import RunFolder, write_job
from manyhands.core.git import revision
from manyhands.core.journal import Journal
from manyhands.core.records import FAILURE_FILE, Failure, write_json
from manyhands.core.world import Membership

Say = Callable[[str], None]
# How a process came to be: one head watches over all, or each machine has its own and they met.
OUR_HEAD, MET = "manyhands", "met"
# Of the cluster's options, those that all processes must agree in. Where they meet is not one of them: rank 0 may call
# it 0.0.0.0, a name, or another of its addresses; and who meets compares the world's size.
SHARED = {"backend"}


def work(argument: dict[str, Any]) -> dict[str, Any]:
    """The entry of a process that manyhands' own agent started; `argument` is plain data.

    Returns:
        What the task returned, as plain data.
    """
    job = Job.model_validate(argument["job"])
    folder = RunFolder(Path(argument["folder"]))
    membership = worker_membership(job.cluster, os.environ)
    # Where the user's own process finds the modules that its objects are from, in its order.
    found = argument.get("paths", [])
    sys.path[:] = [*found, *(path for path in sys.path if path not in found)]
    task = {"train": train_here, "evaluate": evaluate_here, "predict": predict_here, "plan": plan_here}[
        argument["task"]
    ]
    say = _note_in_log
    if argument.get("met"):
        membership = replace(membership, started_by=MET)
        say = _note_in_folder(folder) if membership.local_rank == 0 else _note_in_log
    try:
        return task(job, membership, folder, argument, say)
    except Failed as failed:
        raise SystemExit(failed.record.exit_code) from None


class Failed(Exception):  # noqa: N818 - it carries a failure, it isn't one
    """A process could not go on; carries its record."""

    def __init__(self, record: Failure) -> None:
        super().__init__(record.what)
        self.record = record


def _note_in_log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _note_in_folder(folder: RunFolder) -> Say:
    """Tells the head of this machine, which shows what is in the run folder."""
    return functools.partial(Journal(folder, 0).event, "note")


def train_here(
    job: Job, membership: Membership, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Joins the group, builds the parts, trains, and leaves.

    Raises:
        Failed: something went wrong; its record is in the run folder.
    """
    from manyhands.parallel.group import join
    from manyhands.train.failing import describe_failure

    parts = group = None
    failed = False

    def leave(told: str) -> None:
        """The main thread may wait for an accelerator for ever, so another one writes the record and ends this."""
        record = leave_record(_peer_gone(membership.rank, told, parts), folder)
        sys.stderr.write(f"manyhands: {as_error(record)}\n")
        if group:
            group.abort()

    try:
        group = join(membership, digest(job), job.cluster.collective_timeout_s, say)
        if membership.started_by != OUR_HEAD:
            group.listen(membership.attempt, None if group.world.device in {"cpu", "mps"} else leave)
        if membership.started_by not in {OUR_HEAD, MET}:
            folder = share_folder(group.world, folder)
        job = _from_where_rank_0_says(job, group.world, say)
        parts = _build(job, folder, group.world, argument)
        from manyhands.train.loop import fit

        status = fit(parts)
        parts.journal.event(status, _closing_words(status, parts.progress.step), parts.progress.step)
        return {"status": status, "step": parts.progress.step, "folder": str(folder.path)}
    except BaseException as error:
        failed = True
        step = parts.progress.step if parts else None
        phase = parts.phase if parts else "build" if group else "join"
        record = describe_failure(_explained(error, parts), rank=membership.rank, step=step, phase=phase)
        record = leave_record(record, folder)
        if group and group.cause:
            record = _first_of_all(group, record)
            _write_record(record, folder)
        raise Failed(record) from error
    finally:
        if parts:
            parts.release()
        if group:
            group.leave(failed=failed)


def leave_record(record: Failure, folder: RunFolder) -> Failure:
    """Writes why a process ended to where its head looks for it, and the whole traceback into its log.

    This comes before anything that may wait for other processes, who may be gone. Nothing is made anew: the folder may
    not be known yet, or be gone already.
    """
    log = folder.ranks / f"{record.rank}.log"
    if record.traceback and folder.failures.is_dir():
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(record.traceback)
            if record.exit_code != EXIT_USAGE and not record.mend:
                record = record.model_copy(update={"mend": [f"the whole traceback is in {log}"]})
    _write_record(record, folder)
    return record


def _write_record(record: Failure, folder: RunFolder) -> None:
    """For the agent that started this process, if one did, and into the run folder, whose disk may be full."""
    places = [Path(os.environ[FAILURE_FILE])] if FAILURE_FILE in os.environ else []
    places += [folder.failures / f"{record.rank}.json"] if folder.failures.is_dir() else []
    for place in places:
        with suppress(OSError):
            write_json(place, record)


def _closing_words(status: str, step: int) -> str:
    return f"stopped and saved at step {step}" if status == "stopped" else ""


def _explained(error: BaseException, parts: Any) -> BaseException:
    """An error that can be told better, told better."""
    from manyhands.train.failing import explain_early_memory, explain_memory, is_out_of_memory

    if is_out_of_memory(error):
        explained = explain_memory(error, parts) if parts else explain_early_memory(error)
        explained.__cause__ = error
        return explained
    return error


def _first_of_all(group: Any, record: Failure) -> Failure:
    """Publishes the first cause for the other processes, or learns it from them where this is a mere consequence."""
    if not record.consequence:
        group.cause.publish(record.model_dump_json())
        return record
    told = group.cause.learn()
    if not told:
        # Nothing better is known than what the library itself has said.
        what = f"another process has gone, or can't be reached: {record.what}"
        mend = ["the other processes' own last words may say why", *record.mend]
        return record.model_copy(update={"what": what, "mend": mend, "excerpt": ""})
    return record.model_copy(update=_heard(told))


def _heard(told: str) -> dict[str, Any]:
    """What a failure's record says where the first cause is another process's."""
    first = Failure.model_validate_json(told)
    what = f"rank {first.rank} on {first.host} failed first: {first.what}"
    return {"what": what, "mend": first.mend, "excerpt": first.excerpt}


def _peer_gone(rank: int, told: str, parts: Any) -> Failure:
    """The record of a process that ends because another has; `told` is that one's record, or empty where none came."""
    record = Failure(
        time=time.time(),
        rank=rank,
        host=platform.node(),
        pid=os.getpid(),
        step=parts.progress.step if parts else None,
        phase=parts.phase if parts else "build",
        error="PeerGone",
        what="rank 0's store has gone, and with it the run",
        mend=["rank 0's own last words say why"],
        consequence=True,
    )
    return record.model_copy(update=_heard(told)) if told else record


def digest(job: Job) -> str:
    """Of what must be equal on all processes: the job but for who takes part where, and the version."""
    own = {
        "cluster": set(ClusterOptions.model_fields) - SHARED,
        "data": {"workers", "machine_workers"},
        "run": {"out", "report"},
        "checkpoint": {"resume"},
    }
    content = job.model_dump_json(exclude=own)
    return hashlib.sha256(f"{__version__} {content}".encode()).hexdigest()[:16]


def _from_where_rank_0_says(job: Job, world: Any, say: Say) -> Job:
    """The job with rank 0's word for what the run goes on from: it keeps the run, and gives its state to the others."""
    from manyhands.parallel.plain import broadcast_plain

    own = job.checkpoint.resume
    said = broadcast_plain(own, world)
    if own not in {said, CheckpointOptions().resume}:
        say(f"--resume {own} has no effect on rank {world.rank}: rank 0 says {said}")
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": said})})


def share_folder(world: Any, folder: RunFolder) -> RunFolder:
    """Rank 0's run folder, by its path, made on every machine where it doesn't exist."""
    from manyhands.parallel.plain import broadcast_plain

    folder = RunFolder(Path(broadcast_plain(str(folder.path.absolute()), world)))
    folder.failures.mkdir(parents=True, exist_ok=True)
    return folder


def _build(job: Job, folder: RunFolder, world: Any, argument: dict[str, Any]) -> Any:
    from manyhands.parallel.apply import follows_plan, resolve_mode
    from manyhands.parallel.plain import gather_plain
    from manyhands.sync.choose import resolve_method
    from manyhands.train.job import build

    mode = resolve_mode(job.parallel.mode, world)
    resolve_method(job.sync.method, mode)
    if world.speaks:
        Journal(folder, world.rank).event(
            "started", processes=world.size, device=world.device, backend=world.backend, mode=mode
        )
        if world.device == "cpu" and job.cluster.device == "auto":
            _tell_of_unused_accelerators(Journal(folder, world.rank))
    objects = load_objects(argument)
    followed, about = None, dict[str, Any]()
    if follows_plan(mode):
        mode, followed, about = _follow(job, folder, world, mode, objects)
    parts = build(job, folder, world, mode, objects, followed)
    for note in (*about.get("untimed", ()), *((about["reason"],) if about.get("reason") else ())):
        parts.journal.event("note", note)
    ranks = gather_plain(own_environment(world), world)
    if world.speaks:
        write_job(folder, tomli_w.dumps(job.model_dump(mode="json")))
        write_json(folder.environment, environment(world, ranks))
        write_json(folder.network, parts.trained)
        write_json(folder.plan, {**plan(parts), **about})
    return parts


def _tell_of_unused_accelerators(journal: Journal) -> None:
    """One line where the CPU is taken though this machine has an accelerator, so that nobody loses days to it."""
    from manyhands.cluster.unused import unused_here

    told = unused_here()
    if told:
        journal.event("warning", f"{told[0]}: training on the CPU (do: {told[1][0]}; or give --device cpu)")


def _follow(job: Job, folder: RunFolder, world: Any, mode: str, objects: Any) -> tuple[str, Any, dict[str, Any]]:
    """The mode and plan that the processes follow, and what plan.json says of the choice."""
    from manyhands.parallel.shared_plan import shared_plan
    from manyhands.run.automatic import decide, searches
    from manyhands.train.samples import Objects

    if world.alone or not searches(job):
        return mode, shared_plan(job.parallel, world), {}
    decision = decide(job, world, folder, objects or Objects())
    return (mode if decision.plan else "data"), decision.plan, decision.about


def load_objects(argument: dict[str, Any]) -> Any:
    """What the user's own process handed over; the file is this user's own, in a private folder."""
    path = argument.get("objects")
    if not path:
        return argument.get("live")
    import cloudpickle

    return cloudpickle.loads(Path(path).read_bytes())


def own_environment(world: Any) -> dict[str, Any]:
    """Versions, device and host of this process."""
    import torch
    import torchvision

    kind = world.device.partition(":")[0]
    name = torch.get_device_module(kind).get_device_name() if kind not in {"cpu", "mps"} else platform.processor()
    return {
        "manyhands": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "system": platform.platform(),
        "host": platform.node(),
        "device": world.device,
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def environment(world: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's environment and the revision of the user's code; under "ranks" what differs of each rank."""
    differing = [key for key in ranks[0] if any(own[key] != ranks[0][key] for own in ranks)]
    return {
        "v": 1,
        **ranks[0],
        "processes": world.size,
        "backend": world.backend,
        "git_revision": revision(Path.cwd()),
        "ranks": [{"rank": rank, **{key: own[key] for key in differing}} for rank, own in enumerate(ranks)],
    }


def plan(parts: Any) -> dict[str, Any]:
    """How the work is split, and which exceptions from the same-at-any-number law are in force."""
    from manyhands.train.exceptions import exceptions

    order, cut = parts.feed.order, parts.feed.cut
    shares = cut.passes(min(order.batch, order.length))
    return {
        **split_of(parts),
        "format": "plan/1",
        "mode": parts.mode,
        "sync": asdict(parts.sync),
        "batch": order.batch,
        "shares": [[share.count for share in each] for each in shares],
        "passes": len(shares),
        "norm_group": parts.job.train.norm_group,
        "steps_per_epoch": order.steps_per_epoch,
        "total_steps": parts.total_steps,
        "exceptions": exceptions(parts),
    }


def split_of(parts: Any) -> dict[str, Any]:
    """The mesh, and for a network that is cut which part of each op's work each process does."""
    cutting = parts.network.cutting
    if not cutting:
        return {"mesh": {"dp": parts.world.size}}
    content = cutting.plan.as_plain()
    return {key: value for key, value in content.items() if key != "format"}


def evaluate_here(
    job: Job, membership: Membership, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Evaluates a checkpoint over all processes.

    Raises:
        Failed: something went wrong.
    """

    def evaluate(world: Any) -> dict[str, Any]:
        from manyhands.train.inspect import evaluate_checkpoint

        path = Path(argument["checkpoint"]) if argument["checkpoint"] else None
        given, whole = argument.get("given", ()), bool(argument.get("whole"))
        return evaluate_checkpoint(job, path, world, load_objects(argument), given=given, whole=whole)

    return _together(job, membership, folder, say, evaluate, "evaluate")


def predict_here(
    job: Job, membership: Membership, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Says what is on pictures, shared out among all processes.

    Raises:
        Failed: something went wrong.
    """

    def predict(world: Any) -> dict[str, Any]:
        from manyhands.train.predict import guess_together
        from manyhands.train.trained import open_trained

        trained = open_trained(Path(argument["checkpoint"]), model=argument["model"], device=world.device)
        return {"guesses": guess_together(trained, argument["pictures"], world)}

    return _together(job, membership, folder, say, predict, "predict")


def plan_here(
    job: Job, membership: Membership, folder: RunFolder, argument: dict[str, Any], say: Say
) -> dict[str, Any]:
    """Times plans, proves one, or measures the link between the processes: see the module `trials` of run.

    Raises:
        Failed: something went wrong.
    """

    def try_plans(world: Any) -> dict[str, Any]:
        from manyhands.run.trials import try_out

        return try_out(job, world, argument)

    return _together(job, membership, folder, say, try_plans, str(argument["action"]))


def _together(
    job: Job,
    membership: Membership,
    folder: RunFolder,
    say: Say,
    task: Callable[[Any], dict[str, Any]],
    phase: str,
) -> dict[str, Any]:
    """Joins the group, does the task with its world, and leaves; a failure leaves its record."""
    from manyhands.parallel.group import join
    from manyhands.train.failing import describe_failure

    group = None
    try:
        group = join(membership, digest(job), job.cluster.collective_timeout_s, say)
        return task(group.world)
    except (Exception, KeyboardInterrupt) as error:
        record = describe_failure(error, rank=membership.rank, step=None, phase=phase)
        raise Failed(leave_record(record, folder)) from error
    finally:
        if group:
            group.leave()


def as_error(record: Failure) -> ManyhandsError:
    """A failure's record as an error for the user's screen, with what of its traceback is the user's own."""
    step = f", step {record.step}" if record.step is not None else ""
    where = record.where or f"rank {record.rank} on {record.host}{step}{record.phase and f' ({record.phase})'}"
    if record.where and record.host not in {"", record.where, platform.node()}:
        where += f" on {record.host}"
    kind = UserError if record.exit_code == EXIT_USAGE else RunError
    error = kind(record.what, where, tuple(record.mend))
    error.exit_code = record.exit_code
    if record.excerpt:
        error.add_note(record.excerpt)
    return error
