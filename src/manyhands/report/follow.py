"""Follows a run while it writes: what is new since the last look."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core.files import open_file
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics, line_object
from manyhands.core.run_folder import RunFolder
from manyhands.report.read import parse, parse_metrics


@dataclass
class Tail:
    """Reads the whole lines that were added to a file since the last look."""

    path: Path  # the file; it needn't be there yet
    offset: int = 0  # bytes read so far, up to the end of a line

    def poll(self) -> list[dict[str, Any]]:
        """New lines as plain objects; a torn last line waits for its rest, a damaged one is left out."""
        try:
            with open_file(self.path) as file:
                # A file that shrank was begun anew.
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                text = file.read()
        except (OSError, ValueError):
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [content for line in whole.split(b"\n") if (content := line_object(line)) is not None]

    def skip(self) -> None:
        """Goes to the end of what is there now."""
        with suppress(OSError):
            self.offset = self.path.stat().st_size


class Follower:
    """Gives the new records of a run folder, in the order of their times."""

    def __init__(self, path: Path, *, only_new: bool = False) -> None:
        """Begins at the start of the files, or with `only_new` at what is written from now on."""
        self._folder = RunFolder(path)
        self._metrics = Tail(self._folder.metrics)
        self._events = Tail(self._folder.events)
        if only_new:
            self._metrics.skip()
            self._events.skip()

    def poll(self) -> list[StepMetrics | EvaluationMetrics | Event]:
        """The records since the last poll."""
        new: list[StepMetrics | EvaluationMetrics | Event] = []
        new += [event for line in self._events.poll() if (event := parse(Event, line, self._folder.events))]
        new += [record for line in self._metrics.poll() if (record := parse_metrics(line, self._folder))]
        return sorted(new, key=lambda record: record.time)
