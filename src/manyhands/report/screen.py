"""Displays an active run: on a terminal as a live line, drawn without rich's thread, otherwise as plain lines."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from manyhands.core import files, quantities
from manyhands.core.errors import UserError
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics
from manyhands.core.terminal import TolerantStream, escape_unencodable, plain
from manyhands.report import follow, read, summary

_WINDOW_S = 120.0  # window of the speed for the remaining time, which should neither jump nor lag
_SILENT_S = 20.0  # after this time without a record, the live line shows the age of the newest
_BAR_MIN, _BAR_MAX = 8, 24
_PLAIN_EVERY_S = 30.0
_DISK_EVERY_S = 5.0  # interval of checks for a full disk, which the processes can't record
# Levels of the events that are displayed. All other events are only in events.jsonl.
LEVELS = {
    **dict.fromkeys(("changed", "note", "decision", "regrouped", "resumed", "setup", "undone"), "INFO"),
    **dict.fromkeys(("stopping", "stopped", "sync", "tested"), "INFO"),
    **dict.fromkeys(("restarted", "left-out", "replaced", "slow", "stall", "warning"), "WARNING"),
}
# Kinds of events that are displayed after the setup, even if recorded before.
_AFTER_SETUP = {"warning", "note", "sync"}
_STYLES = {"INFO": "", "WARNING": "yellow", "ERROR": "red"}


@dataclass
class ScreenProgress:
    """The state of a run that the live line shows."""

    last: StepMetrics | None = None  # the newest step record
    saved: float | None = None  # time of the newest checkpoint
    heard: float | None = None  # time of the newest record
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (time, step) of the last minutes

    def add_record(self, record: StepMetrics | EvaluationMetrics | Event) -> None:
        self.heard = record.time
        if isinstance(record, StepMetrics):
            if self.last and record.saved_step > self.last.saved_step:
                self.saved = max(self.saved or 0.0, record.time)
            if self.last and record.step <= self.last.step:
                self.recent.clear()
            self.last = record
            self.recent.append((record.time, record.step))
            while len(self.recent) > 2 and record.time - self.recent[0][0] > _WINDOW_S:
                self.recent.popleft()
        elif isinstance(record, Event) and record.kind == "saved":
            self.saved = record.time
        elif isinstance(record, Event) and record.kind in read.STARTS:
            self.recent.clear()

    def remaining_s(self, now: float) -> float | None:
        """Estimates the remaining time (s) of the run from the speed in the last two minutes; None if unknown."""
        if self.last is None or len(self.recent) < 2:
            return None
        (start, first), (end, newest) = self.recent[0], self.recent[-1]
        if end <= start or newest <= first:
            return None
        left = (self.last.total_steps - newest) * (end - start) / (newest - first)
        return max(0.0, left - max(0.0, now - end))


def live_line(progress: ScreenProgress, now: float, width: int, *, ascii_only: bool = False) -> Text:
    """Returns the progress as a line of at most `width` columns, without the least important fields if necessary."""
    step = progress.last
    if step is None:
        return Text(("starting ..." if ascii_only else "starting …")[:width], "dim")
    epoch, done = summary.epoch_position(step)
    epochs, share = max(epoch, -(-step.total_steps // step.steps_per_epoch)), done / step.steps_per_epoch
    head, shown = f"epoch {epoch}/{epochs} ", f" {quantities.percentage(share, 0):>3}%"
    fields = _line_fields(progress, step, now)
    room = width - len(head) - len(shown) - _BAR_MIN
    while fields and sum(len(words) + 2 for words, _ in fields) > room:
        fields.remove(max(fields, key=lambda entry: entry[1]))
    text = "".join(f"  {words}" for words, _ in fields)
    bar = max(0, min(_BAR_MAX, width - len(head) - len(shown) - len(text)))
    full, half, rest = ("#", "", "-") if ascii_only else ("━", "╸", "─")
    halves = round(max(0.0, min(1.0, share)) * bar * 2)
    filled = full * (halves // 2) + (half if halves % 2 else "")
    drawn = Text(filled, "cyan") + Text(rest * (bar - len(filled)), "dim")
    line = Text(head, "bold") + drawn + Text(shown + text)
    line.truncate(width)
    return line


def _line_fields(progress: ScreenProgress, step: StepMetrics, now: float) -> list[tuple[str, int]]:
    """Returns (text, priority) of the fields after the bar. Fields with the highest number are dropped first."""
    silent, left = now - (progress.heard or now), progress.remaining_s(now)
    heard = f"last record {summary.ago(silent)}" if silent > _SILENT_S else f"{summary.rate(step.images_per_s)} img/s"
    fields = [(f"loss {summary.number(step.loss)}", 0), (f"acc {summary.percent(step.top1)}", 1), (heard, 3)]
    if left is not None:
        fields.append((f"left {summary.duration(left)}", 2))
    if step.data_share >= 0.1 and silent <= _SILENT_S:
        fields.append((f"data {step.data_share:.0%}", 5))
    if progress.saved is not None:
        fields.append((f"saved {summary.ago(now - progress.saved)}", 4))
    return fields


def step_line(step: StepMetrics) -> str:
    """Formats a step for a log, as key=value pairs."""
    epoch, done = summary.epoch_position(step)
    return (
        f"epoch={epoch} step={done}/{step.steps_per_epoch} loss={step.loss:.3f} acc={quantities.percentage(step.top1)} "
        f"img_s={summary.rate(step.images_per_s)} data_pct={100 * step.data_share:.0f}"
    )


def evaluation_line(record: EvaluationMetrics, last: StepMetrics | None, *, log: bool = False) -> str:
    """Formats an evaluation for the screen or a log, with the training loss if the evaluation ends an epoch."""
    name = summary.epoch_name(record.step, record.epoch, last.steps_per_epoch if last else 0)
    train_loss = last.epoch_loss if last and last.step == record.step else None
    if log:
        fifth = "" if 0 < record.classes <= summary.FEW_CLASSES else f"top5={quantities.percentage(record.top5, 2)} "
        trained = "" if train_loss is None else f" train_loss={train_loss:.3f}"
        return (
            f"epoch={name} evaluated={record.count} top1={quantities.percentage(record.top1, 2)} {fifth}"
            f"val_loss={record.loss:.3f}{summary.custom_metrics(record.metrics, ' {}={}')}{trained}"
            + (" best" if record.best else "")
        )
    fifth = summary.top5(record.top5, record.classes, ", top-5 {}")
    trained = "" if train_loss is None else f", train loss {summary.number(train_loss)}"
    return (
        f"epoch {name}: top-1 {summary.percent(record.top1)}{fifth}, loss {summary.number(record.loss)}"
        f"{summary.custom_metrics(record.metrics, ', {} {}')}{trained}" + (", best" if record.best else "")
    )


def epoch_line(last: StepMetrics, *, log: bool = False) -> str:
    loss, top1 = last.epoch_loss or 0.0, last.epoch_top1 or 0.0
    if log:
        return f"epoch={last.epoch} train_loss={loss:.3f} train_top1={quantities.percentage(top1, 2)}"
    return f"epoch {last.epoch}: train loss {summary.number(loss)}, train top-1 {summary.percent(top1)}"


class Screen:
    """Displays new records of a run folder while the run is active."""

    def __init__(
        self,
        folder: Path,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        lines: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Follows `folder`, which need not exist yet.

        `quiet`: shows the setup in one line, and warnings. `lines`: writes plain lines even to a terminal.
        """
        output = stream or sys.stderr
        terminal = not lines and output.isatty() and os.environ.get("TERM", "") not in {"dumb", "unknown"}
        self.live = terminal and not quiet
        self.folder, self._quiet, self._clock = folder, quiet, clock
        self._follower = follow.Follower(folder, only_new=True)
        self._console = Console(
            file=cast(TextIO, TolerantStream(output)),
            # rich reads NO_COLOR itself. FORCE_COLOR may color a log, but never moves its cursor.
            force_terminal=terminal or bool(os.environ.get("FORCE_COLOR")),
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._progress = ScreenProgress()
        self._stopping = False
        self._shown: set[tuple[str, str]] = set()  # levels and messages that were shown
        self._before_setup: list[Event] | None = None  # events of a start whose setup isn't recorded yet; else None
        self._plain_at = self._disk_at = clock()
        self._disk_full = False
        self._drawn = ""  # the live line
        self._epoch_end: StepMetrics | None = None  # the end of an epoch whose loss isn't shown yet

    def update(self) -> None:
        """Displays new records; cheap enough to call a few times a second."""
        try:
            new = self._follower.poll()
        except UserError as error:
            self._show_once("WARNING", error.message)
            new = []
        for record in new:
            if isinstance(record, StepMetrics):
                self._show_epoch()
                self._epoch_end = record if record.epoch_loss is not None else None
            self._progress.add_record(record)
            if isinstance(record, EvaluationMetrics):
                last = self._progress.last
                if last and record.step == last.step:
                    self._epoch_end = None  # the evaluation's line shows it too
                self.say(evaluation_line(record, last, log=not self.live))
            elif isinstance(record, Event):
                self._show_event(record)
            elif record.asked:
                self.say(step_line(record))
            if not isinstance(record, Event) or record.kind == "setup":
                self._show_events_before_setup()
        self._check_disk()
        if self.live:
            self._draw()
        elif not self._quiet and self._progress.last and self._clock() - self._plain_at >= _PLAIN_EVERY_S:
            self._plain_at = self._clock()
            self.say(step_line(self._progress.last))

    def say(self, message: str, level: str = "INFO", *, always: bool = False) -> None:
        """Displays a permanent line above the live line. A quiet screen skips level INFO, except with `always`."""
        if self.live:
            self._erase()
            prefix = "" if level == "INFO" else f"{level.lower()}: "
            text = escape_unencodable(prefix + plain(message), self._console.file)
            self._console.print(Text(text, _STYLES[level]), soft_wrap=False)
        elif always or not (self._quiet and level == "INFO"):
            line = Text(f"{summary.format_utc(self._clock())} ")
            line.append(level, _STYLES[level]).append(f" {escape_unencodable(plain(message), self._console.file)}")
            self._console.print(line)

    def close(self) -> None:
        self.update()
        self._show_events_before_setup()
        self._show_epoch()
        self._erase()

    def _show_epoch(self) -> None:
        last, self._epoch_end = self._epoch_end, None
        if last:
            self.say(epoch_line(last, log=not self.live))

    def _show_event(self, event: Event) -> None:
        if event.kind == "started":
            self._before_setup = []
        elif self._before_setup is not None and event.kind in _AFTER_SETUP:
            self._before_setup.append(event)
            return
        self._stopping |= event.kind == "stopping"
        # The live line shows saves; a save that Ctrl-C requested gets a separate line.
        if event.kind not in LEVELS and not (event.kind == "saved" and self._stopping):
            return
        at = f" at step {event.step}" if event.step is not None else ""
        message = ("" if event.kind == "saved" else event.message) or f"{event.kind}{at}"
        level = LEVELS.get(event.kind, "INFO")
        setup = event.kind == "setup"
        for line in message.split("\n") if setup and not self._quiet else [message]:
            self._show_once(level, line, always=setup)

    def _show_events_before_setup(self) -> None:
        events, self._before_setup = self._before_setup, None
        for event in events or ():
            self._show_event(event)

    def _show_once(self, level: str, message: str, *, always: bool = False) -> None:
        if (level, message) not in self._shown:
            self._shown.add((level, message))
            self.say(message, level, always=always)

    def _check_disk(self) -> None:
        if (now := self._clock()) - self._disk_at < _DISK_EVERY_S:
            return
        self._disk_at, before = now, self._disk_full
        self._disk_full = files.is_disk_full(self.folder)
        if self._disk_full > before:
            effect = "training continues, but records are delayed and checkpoints are skipped"
            self.say(f"the disk of {self.folder} is full: {effect}", "WARNING")
        elif self._disk_full < before:
            self.say(f"the disk of {self.folder} has free space again")

    def _draw(self) -> None:
        width = self._console.size.width - 1
        line = live_line(self._progress, self._clock(), width, ascii_only=self._console.options.ascii_only)
        if line.markup == self._drawn:
            return
        # A single write avoids flicker.
        with self._console:
            self._erase()
            self._console.print(line, end="", no_wrap=True, overflow="crop")
        self._drawn = line.markup

    def _erase(self) -> None:
        if self._drawn:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._drawn = ""
