"""Writes the metadata of a run's start on rank 0: the job, the environment, the network and the plan."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from manyhands import __version__
from manyhands.cluster.agents.folders import replace_job, writing_into
from manyhands.core.plan_record import PlanRecord, write_plan_record
from manyhands.core.records import read_lines, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import plain
from manyhands.core.user_code import git_revision
from manyhands.sync.options import methods
from manyhands.train.journal import Journal


def write_metadata(trainer: Any, plan_fields: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes job.toml, env.json, network.json and plan.json, and an event for each changed option. A collective.

    If an earlier start of the run has trained, writes the files after the first update of this start. `plan_fields`:
    further fields of plan.json. Raises UserError if options were changed, but no update remains.
    """
    from manyhands.parallel.group.plain import gather_plain

    ranks = gather_plain(local_environment(trainer.world), trainer.world)
    if not trainer.world.is_main:
        return
    folder, journal, step = trainer.folder, trainer.journal, trainer.progress.step
    trained, changes = folder.has_trained(), list[Any]()
    if trained or trainer.due.finished():
        from manyhands.report.changes import changes_since, refuse_ineffective

        if trained:
            record_undone_steps(folder, journal, step)
            changes = changes_since(folder, trainer.job)
        if trainer.due.finished():
            refuse_ineffective(folder, changes, step, trainer.due.total_steps)
    plan = plan_record(trainer)
    known, became = len(plan.exceptions), resolved_options(trainer, plan)
    job, own = job_text(trainer.job, became), ranks[0]
    differing = [key for key in own if any(one[key] != own[key] for one in ranks)]
    environment = {
        "v": 1,
        **own,
        "processes": trainer.world.size,
        "backend": trainer.world.backend,
        "git_revision": git_revision(Path.cwd()),
        "ranks": [{"rank": rank, **{key: one[key] for key in differing}} for rank, one in enumerate(ranks)],
    }

    def write_files() -> None:
        write_json(folder.environment, environment)
        write_json(folder.network, trainer.trained)
        options = became | plan_fields.get("resolved", {})
        write_plan_record(folder.plan, plan.model_copy(update={**plan_fields, "resolved": options}))

    def note_differing_buffers(names: list[str]) -> None:
        more = f" and {len(names) - 3} more buffers" if len(names) > 3 else ""
        which = ", ".join(names[:3]) + more
        message = f"{which}: each process updates these from its own samples; all use rank 0's values."
        if message not in plan.exceptions:
            plan.exceptions[known:] = [message]
            journal.event("warning", message, trainer.progress.step)
            journal.write_file(write_files)

    def write_on_first_update() -> None:
        for change in changes:
            message = f"{change} (from step {step})"
            journal.event("changed", message, step, option=change.key, old=change.old, new=change.new)
        journal.write_file(lambda: replace_job(folder, job))
        journal.write_file(write_files)

    if trained:
        trainer.hooks.on_first_update = write_on_first_update
    else:
        with writing_into(folder.path):
            replace_job(folder, job)
        write_files()
    trainer.hooks.on_differing_buffers = note_differing_buffers


def record_undone_steps(folder: RunFolder, journal: Journal, step: int) -> None:
    """Records an event if updates are repeated because the previous start of the run didn't save them."""
    from manyhands.report.follow import last_records

    # The last event is from this start.
    resumed = (line for line in read_lines(folder.events) if line.get("kind") == "resumed")
    *_, since, _ = [0.0, 0.0, *(line.get("time", 0.0) for line in resumed)]
    lines = (line for line in last_records(folder.metrics) if isinstance(line.get("step"), int))
    newest = max((line["step"] for line in lines if line.get("time", since) >= since), default=0)
    if newest > step:
        message = f"steps {step + 1} to {newest} were not saved and are repeated"
        journal.event("undone", message, step, first=step + 1, last=newest)


def resolved_options(trainer: Any, plan: PlanRecord) -> dict[str, Any]:
    """Returns the selected values of automatic options ("auto", "", 0, -1 or []), by dotted key.

    The job file keeps the automatic values, so a resumed run selects again, except for precision and memory format.
    """
    job, pictures, world, sync = trainer.job, trainer.trained.pictures, trainer.world, trainer.sync.cost
    found: dict[str, Any] = {
        "data.image_size": pictures.size,
        "data.channels": pictures.channels,
        "data.mean": [round(value, 6) for value in pictures.mean],
        "data.std": [round(value, 6) for value in pictures.std],
        "data.augment": trainer.feed.augment,
        "model.num_classes": len(trainer.trained.classes),
        "train.micro_batch": max(max(shares, default=0) for shares in plan.shares),
        "parallel.mode": trainer.run.mode,
        "parallel.mesh": ",".join(f"{name}={size}" for name, size in plan.mesh.items()),
        "sync.method": sync.method,
        "cluster.processes": world.size,
        "cluster.device": world.device.partition(":")[0],
        "cluster.backend": world.backend or "none",
        "run.out": str(trainer.folder.path),
    }
    decided, section = asdict(sync), getattr(methods()[sync.method], "Options", None)
    found |= {f"sync.{key}": decided[key] for key in (section.model_fields if section else ()) if key in decided}
    values = job.model_dump(mode="json")
    asked = {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in found}
    automatic: tuple[Any, ...] = ("auto", "", 0, -1, [])
    return {key: value for key, value in found.items() if asked[key] in automatic and value != asked[key]}


def job_text(job: Any, resolved: dict[str, Any]) -> str:
    """Returns the job as TOML, with the resolved values of automatic options, by dotted key, as comments."""
    shown = {key: plain(value) if isinstance(value, str) else value for key, value in resolved.items()}
    lines, section = list[str](), ""
    for line in tomli_w.dumps(job.model_dump(mode="json")).splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        key = f"{section}.{line.partition(' = ')[0]}"
        comment = f"  # here: {json.dumps(shown[key], ensure_ascii=False)}" if " = " in line and key in resolved else ""
        lines.append(line + comment)
    return "\n".join(lines) + "\n"


def local_environment(world: Any) -> dict[str, Any]:
    import torch

    from manyhands.core.devices import device_name

    return {
        "manyhands": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "system": platform.platform(),
        "host": platform.node(),
        "device": world.device,
        "device_name": device_name(world.device),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def plan_record(trainer: Any) -> PlanRecord:
    """Returns the content of plan.json. Its `exceptions` say why results depend on the number of processes."""
    from manyhands.train.trainer import process_count_dependence_reasons

    order, sharing, plan = trainer.feed.order, trainer.feed.sharing, trainer.network.traits.plan
    shares = sharing.micro_batches(min(order.batch, order.length))
    split = plan.as_plain() if plan else {"mesh": {"dp": trainer.world.size}}
    return PlanRecord.model_validate({
        **split,
        "mode": trainer.run.mode,
        "sync": asdict(trainer.sync.cost),
        "batch": order.batch,
        "shares": [[share.count for share in each] for each in shares],
        "passes": len(shares),
        "averages": trainer.network.traits.averaging,
        "precision": trainer.job.train.precision,
        "channels_last": trainer.job.train.channels_last,
        "compile": trainer.job.train.compile,
        "norm_group": trainer.job.train.norm_group,
        "steps_per_epoch": order.steps_per_epoch,
        "total_steps": trainer.due.total_steps,
        "exceptions": process_count_dependence_reasons(trainer),
    })  # fmt: skip
