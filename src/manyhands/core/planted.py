"""A fault that a drill plants in a run: what is to go wrong, on which rank, at which pass of training, and once."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Of the processes' environment; it holds what a drill wants in JSON.
VARIABLE = "DRILL_FAULT"
RAISED = "this error was planted by a drill"


@dataclass(frozen=True)
class PlantedFault:
    """What goes wrong."""

    folder: str  # where it is noted that it was done, and when the run trained again
    group: str  # a folder of the system's (cgroup) in which memory is short
    model: dict[str, Any]  # the options of the network to train
    channels: int  # of its pictures
    size: int  # of its pictures
    what: str = ""  # a word of `worker/faulty_network.py`; empty: nothing
    rank: int = 0  # of the process
    call: int = 0  # the pass of training, counted from 1 in each process
    always: bool = False  # at each start, soon after it, not once

    @property
    def done(self) -> Path:
        """Is there once it has been done."""
        return Path(self.folder) / "done"

    @property
    def again(self) -> Path:
        """Is there once a process that was started later trains."""
        return Path(self.folder) / "again"

    @property
    def calls(self) -> Path:
        """Holds how many passes rank 0 has made, where nothing is to go wrong."""
        return Path(self.folder) / "calls"

    @property
    def go(self) -> Path:
        """Lets a process go on that waits."""
        return Path(self.folder) / "go"

    def as_variable(self) -> dict[str, str]:
        """For the environment of the run."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def here(cls) -> "PlantedFault":
        """The one of this process's environment."""
        return cls(**json.loads(os.environ[VARIABLE]))
