"""Compares a job with the job of its run folder, and refuses changes that would have no effect."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.checkpoint.files import step_folders
from manyhands.checkpoint.trained import INITIAL_WEIGHTS, find_record
from manyhands.config.job import KEYS_OF_BUILT_IN_OPTIMIZERS, MEASURED, Job
from manyhands.config.load import LoadedJob, flatten, written_values
from manyhands.core.errors import UserError
from manyhands.core.files import unused_path
from manyhands.core.run_folder import OBJECTS, RunFolder
from manyhands.core.user_code import code_digests
from manyhands.report.read import read_run
from manyhands.report.summary import status

_OF_THE_START = {"run.out", "checkpoint.resume"}  # the location of the run, which each start sets again
# Sections that affect the result, and their options that don't.
_DECIDING = {"data", "model", "train", "parallel", "sync"}
_NOT_DECIDING = {
    "data.dir", "data.download", "data.workers", "data.machine_workers", "data.memory_limit_mib",
    "train.evaluate_batch", "train.metrics", "train.audit_every", "parallel.measure",
}  # fmt: skip
_MOST_SHOWN = 4


class Change(NamedTuple):
    """A changed option, or changed code, objects or data."""

    key: str
    old: Any  # None unless the key is an option
    new: Any

    @property
    def decides(self) -> bool:
        """True if the change affects the result of the run, or adds metrics."""
        if self.key == "train.metrics" and self.old is not None:
            return not set(self.new) <= set(self.old)
        return self.old is None or (self.key.partition(".")[0] in _DECIDING and self.key not in _NOT_DECIDING)

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.key} changed"
        new, old = (json.dumps(value, ensure_ascii=False) for value in (self.new, self.old))
        return f"{self.key} is {new}, and was {old}"


def changes_since(folder: RunFolder, job: Job) -> list[Change]:
    """Returns the options that differ from job.toml. Ignores "auto" for measured values. Raises UserError."""
    former = written_values(folder.job) if folder.exists() else {}
    now = flatten(job.model_dump(mode="json")).items()
    known = [Change(key, former[key], value) for key, value in now if key in former and key not in _OF_THE_START]
    return [one for one in known if not _equal(one.old, one.new) and not (one.key in MEASURED and one.new == "auto")]


def refuse_changes(
    loaded: LoadedJob, *, resume_hint: bool = False, digests: Callable[[], Mapping[str, str]] = dict
) -> None:
    """Raises UserError if the job or code has changed after the run finished, because the change would have no effect.

    Of an unfinished run with checkpoints, another network or data set is refused. `resume_hint`: the user asked to
    resume, so that only changes without effect are refused. `digests`: returns the digests, by name, of objects and
    code that the job doesn't name.
    """
    job, folder = loaded.job, RunFolder(Path(loaded.job.run.out).expanduser())
    if not job.run.out or job.checkpoint.resume != "auto" or not folder.exists():
        return
    found = [change for change in changes_since(folder, job) if change.decides]
    asked = resume_hint or "checkpoint.resume" in loaded.origins
    another = f"use --out {shlex.quote(str(unused_path(folder.path.parent, folder.path.name, first=2)))}"
    if status(run := read_run(folder.path)) != "finished":
        other = [change for change in found if change.key in {"data.name", "model.name"}]
        if other and not asked and step_folders(folder.checkpoints):
            words = ["manyhands", "resume", str(folder.path), *_as_flags(other)]
            hints = (another, f"or, to continue the run with this change: {shlex.join(words)}")
            raise UserError(f"{folder.path} holds another run: {_format_changes(other)}", "--out", hints)
        return
    if not found:
        named = (job.model.name, job.data.name, job.data.held_out, *job.train.custom_code)
        try:
            record = find_record(folder.checkpoints / "any", {})
        except UserError:
            record = None  # without a readable record nothing can be compared
        changed = record.changed_names({**code_digests(named), **digests()}) if record else ()
        found = [Change(name, None, None) for name in changed]
    if "checkpoint.resume" in loaded.origins:
        found = [change for change in found if change.key != INITIAL_WEIGHTS]  # a resumed run loads its own weights
    if not found:
        return
    if not asked:
        hints = [*_longer_hint(folder, job, found), f"to train from scratch, {another}"]
        if [change.key for change in found] == [INITIAL_WEIGHTS]:
            hints.append('to return the finished run, pass checkpoint__resume="auto"')
        what = f"the run in {folder.path} has finished, but the job has changed: {_format_changes(found)}"
        raise UserError(what, "--out", tuple(hints))
    longer = any(
        change.key in {"train.max_steps", "train.batch"} or (change.key == "train.epochs" and change.new > change.old)
        for change in found
    )
    if run.steps and not longer:
        refuse_ineffective(folder, found, run.steps[-1].step, run.steps[-1].total_steps)


def refuse_ineffective(folder: RunFolder, found: list[Change], step: int, total: int) -> None:
    if deciding := [change for change in found if change.decides]:
        made = f"this run has made {step} updates and the job asks for {total}"
        hints = ("increase --epochs to train longer", "or use another --out to train from scratch")
        what = f"{made}, so the changes would have no effect: {_format_changes(deciding)}"
        raise UserError(what, str(folder.path), hints)


def _longer_hint(folder: RunFolder, job: Job, found: list[Change]) -> list[str]:
    """Returns a hint with the command that trains a finished run longer; [] if the network or data set has changed."""
    if any(change.key == "data.name" or change.key.startswith("model.") for change in found):
        return []
    former = written_values(folder.job).get("train.epochs")
    before = former if isinstance(former, int) else job.train.epochs
    epochs = job.train.epochs if job.train.epochs > before else 2 * max(1, before)
    if job.data.name == OBJECTS:
        return [f'to train this run longer: fit(…, epochs={epochs}, checkpoint__resume="auto")']
    lost = () if job.train.built_in else KEYS_OF_BUILT_IN_OPTIMIZERS
    rest = [each for each in found if each.old is not None and each.key not in {"train.epochs", *lost}]
    words = ["manyhands", "resume", str(folder.path), "--epochs", str(epochs), *_as_flags(rest)]
    return [f"to train this run longer: {shlex.join(words)}"]


def _as_flags(found: list[Change]) -> list[str]:
    return [word for one in found for word in ("--set", f"{one.key}={json.dumps(one.new, ensure_ascii=False)}")]


def _format_changes(found: list[Change]) -> str:
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return "; ".join(map(str, found[:_MOST_SHOWN])) + more


def _equal(old: Any, new: Any) -> bool:
    paths = [os.path.abspath(Path(value).expanduser()) for value in (old, new) if isinstance(value, str) and value]  # noqa: PTH100
    return old == new or (len(paths) == 2 and paths[0] == paths[1])
