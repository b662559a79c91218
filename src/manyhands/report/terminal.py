"""The screen of a running job: a live line on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from manyhands.core.errors import UserError
from manyhands.core.files import is_full
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics
from manyhands.core.terminal import Tolerant, plain
from manyhands.report.follow import Follower
from manyhands.report.line import (
    ScreenProgress,
    epoch_line,
    epoch_log,
    evaluation_line,
    evaluation_log,
    live_line,
    step_line,
)
from manyhands.report.words import moment

_PLAIN_EVERY_S = 30.0
# The processes can't say on a full disk that it is full, so the screen looks now and then.
_DISK_EVERY_S = 5.0
# Events that are told, and how loud. All others are only in events.jsonl.
LEVELS = {
    "changed": "INFO",
    "note": "INFO",
    "decision": "INFO",
    "regrouped": "INFO",
    "resumed": "INFO",
    "setup": "INFO",
    "restarted": "WARNING",
    "left-out": "WARNING",
    "replaced": "WARNING",
    "undone": "INFO",
    "slow": "WARNING",
    "stall": "WARNING",
    "stopping": "INFO",
    "stopped": "INFO",
    "sync": "INFO",
    "tested": "INFO",
    "warning": "WARNING",
}
# Events that may be recorded before the setup of a start and are shown after it.
_AFTER_SETUP = {"warning", "note", "sync"}
_STYLES = {"INFO": "", "WARNING": "yellow", "ERROR": "red"}


class Screen:
    """Shows a run folder while a run fills it. What was there before the screen isn't told again."""

    def __init__(
        self,
        folder: Path,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        lines: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begins to follow `folder`, which needn't be there yet. `quiet`: the setup in one line, warnings, failures.

        `lines`: plain ones on a terminal too.
        """
        output = sys.stderr if stream is None else stream
        terminal = not lines and output.isatty() and os.environ.get("TERM", "") not in {"dumb", "unknown"}
        self.live = terminal and not quiet
        self._quiet = quiet
        self._clock = clock
        self._follower = Follower(folder, only_new=True)
        # rich looks at NO_COLOR itself; FORCE_COLOR may colour a log, but never moves its cursor.
        colour = terminal or bool(os.environ.get("FORCE_COLOR"))
        self._console = Console(
            file=cast(TextIO, Tolerant(output)),
            force_terminal=colour,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._progress = ScreenProgress()
        self._stopping = False
        self._shown_lines: set[tuple[str, str]] = set()
        self._held: list[Event] | None = None  # of a start whose setup isn't recorded yet
        self._plain_at = clock()
        self._drawn = ""
        self._untold: StepMetrics | None = None
        self.folder, self._disk_at, self._disk_full = folder, clock(), False

    def update(self) -> None:
        """Reads what is new and shows it. Cheap: to be called a few times a second."""
        try:
            new = self._follower.poll()
        except UserError as error:
            self._show("WARNING", error.message)
            new = []
        for record in new:
            if isinstance(record, StepMetrics):
                self._show_epoch()
                self._untold = record if record.epoch_loss is not None else None
            self._progress.take(record)
            if isinstance(record, EvaluationMetrics):
                self._show_evaluation(record)
            elif isinstance(record, Event):
                self._show_event(record)
            elif record.asked:
                self.say(step_line(self._progress))
            if not isinstance(record, Event) or record.kind == "setup":
                self._show_held()
        self._look_at_disk()
        if self.live:
            self._draw()
        elif not self._quiet and self._progress.last and self._clock() - self._plain_at >= _PLAIN_EVERY_S:
            self._plain_at = self._clock()
            self._log("INFO", step_line(self._progress))

    def say(self, message: str, level: str = "INFO") -> None:
        """Shows a line that stays, above the live one."""
        if self._quiet and level == "INFO":
            return
        text = plain(message)
        if not self.live:
            self._log(level, text)
            return
        self._erase()
        prefix = "" if level == "INFO" else f"{level.lower()}: "
        self._console.print(Text(self._encodable(prefix + text), _STYLES[level]), soft_wrap=False)

    def close(self) -> None:
        """Shows the last records and leaves the terminal as it was found."""
        self.update()
        self._show_held()
        self._show_epoch()
        self._erase()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_evaluation(self, record: EvaluationMetrics) -> None:
        last = self._progress.last
        if last and self._untold and record.step == last.step:
            self._untold = None  # the evaluation's line says it too
        self.say(evaluation_line(record, last) if self.live else evaluation_log(record, last))

    def _show_epoch(self) -> None:
        """The training loss of an epoch that no evaluation follows."""
        last, self._untold = self._untold, None
        if last:
            self.say(epoch_line(last) if self.live else epoch_log(last))

    def _show_event(self, event: Event) -> None:
        if event.kind == "started":
            self._held = []
        elif self._held is not None and event.kind in _AFTER_SETUP:
            self._held.append(event)
            return
        self._stopping |= event.kind == "stopping"
        # Saves are shown by the live line; the one that answers Ctrl-C deserves a line of its own.
        if event.kind not in LEVELS and not (event.kind == "saved" and self._stopping):
            return
        at = f" at step {event.step}" if event.step is not None else ""
        message = "" if event.kind == "saved" else event.message
        level, words = LEVELS.get(event.kind, "INFO"), message or f"{event.kind}{at}"
        if event.kind != "setup":
            self._show(level, words)
        elif not self._quiet:
            for line in words.split("\n"):
                self._show(level, line)
        elif (level, words) not in self._shown_lines:
            self._shown_lines.add((level, words))
            self._log(level, plain(words))

    def _show_held(self) -> None:
        """Shows what was recorded before the setup of the latest start."""
        held, self._held = self._held, None
        for event in held or ():
            self._show_event(event)

    def _look_at_disk(self) -> None:
        """Says when the disk of the run folder is full, and when there is room again."""
        if self._clock() - self._disk_at < _DISK_EVERY_S:
            return
        self._disk_at = self._clock()
        full = is_full(self.folder)
        if full and not self._disk_full:
            words = "training continues, but records are delayed and checkpoints are skipped"
            self.say(f"the disk of {self.folder} is full: {words}", "WARNING")
        elif self._disk_full and not full:
            self.say(f"the disk of {self.folder} has free space again")
        self._disk_full = full

    def _show(self, level: str, message: str) -> None:
        if (level, message) not in self._shown_lines:
            self._shown_lines.add((level, message))
            self.say(message, level)

    def _log(self, level: str, message: str) -> None:
        line = Text(f"{moment(self._clock())} ")
        line.append(level, _STYLES[level]).append(f" {self._encodable(message)}")
        self._console.print(line)

    def _draw(self) -> None:
        width = self._console.size.width - 1
        line = live_line(self._progress, self._clock(), width, ascii_only=self._console.options.ascii_only)
        if line.markup == self._drawn:
            return
        # One write for both, so that nothing flickers.
        with self._console:
            self._erase()
            self._console.print(line, end="", no_wrap=True, overflow="crop")
        self._drawn = line.markup

    def _erase(self) -> None:
        if self._drawn:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._drawn = ""

    def _encodable(self, text: str) -> str:
        """The text with characters that the stream can't write spelled out."""
        encoding = getattr(self._console.file, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)
