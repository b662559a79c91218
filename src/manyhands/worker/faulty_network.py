"""The network that a drill trains: the user's own, with a fault at one pass of training on one rank.

Weights, their names and the order of operations are those of the network alone, so a run without the fault ends alike.
"""

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands.core.planted import RAISED, PlantedFault
from manyhands.models.build import build_model
from manyhands.models.options import ModelOptions

# A process that is let go by nobody ends.
PATIENCE_S = 60.0
# Less than a checkpoint's weights take.
SMALL_FILE_BYTES = 1 << 10
# For so many passes the disk is full.
FULL_PASSES = 50
# The pass of a later start at which comes what comes at each.
SOON = 5


def network(num_classes: int) -> nn.Module:
    """The network, which hears of each of its passes."""
    fault = PlantedFault.here()
    options = ModelOptions(**fault.model)
    made = build_model(options, channels=fault.channels, size=fault.size, num_classes=num_classes)
    calls = _Calls(fault)
    made.register_forward_pre_hook(calls.before)
    made.register_forward_hook(calls.after)
    return made


class _Calls:
    """Counts the passes of training, and does what is to go wrong at one of them."""

    def __init__(self, fault: PlantedFault) -> None:
        self.fault, self.count = fault, 0
        self.later = self.again = fault.done.exists()

    def before(self, module: nn.Module, _images: Any) -> None:
        if not module.training:
            return
        self.count += 1
        if self.later:
            self.fault.again.touch()
            self.later = False
        if not self.fault.what:
            self.fault.calls.write_text(str(self.count))
        elif self.fault.what == "crawl":
            self.crawl()
        elif self.due and self.fault.what in _DEEDS:
            self.note()
            _DEEDS[self.fault.what](self.fault)
        elif self.fault.what == "disk" and self.count == self.fault.call + FULL_PASSES:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def crawl(self) -> None:
        """From that pass on, in later starts too, one pass a second, until the drill has done what it does."""
        if (
            self.rank == self.fault.rank
            and (self.again or self.count >= self.fault.call)
            and not self.fault.go.exists()
        ):
            if not self.fault.done.exists():
                self.note()
            time.sleep(1)

    def after(self, module: nn.Module, _images: Any, output: torch.Tensor) -> torch.Tensor:
        if module.training and self.fault.what == "nan" and self.due:
            self.note()
            return output * float("nan")
        return output

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def due(self) -> bool:
        if (self.rank, self.count) == (self.fault.rank, self.fault.call):
            return self.fault.always or not self.fault.done.exists()
        return self.rank == self.fault.rank and self.fault.always and self.again and self.count == SOON

    def note(self) -> None:
        """Begun by whoever it happens to, so that it has been done when it happens."""
        self.fault.done.write_text(str(time.time()))


def _raise(_fault: PlantedFault) -> None:
    raise RuntimeError(RAISED)


def _wait(fault: PlantedFault) -> None:
    """Until the drill has done what it does from outside."""
    until = time.monotonic() + PATIENCE_S
    while not fault.go.exists():
        if time.monotonic() > until:
            raise TimeoutError("the drill did not let this process go on")
        time.sleep(0.02)


def _eat(fault: PlantedFault) -> None:
    """Takes memory where there is little, until the system ends this process."""
    (Path(fault.group) / "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(1)  # so that who watches this process sees it there
    eaten: list[bytes] = []
    while True:
        eaten.append(b"x" * (1 << 20))


def _fill(_fault: PlantedFault) -> None:
    """No file of this process may be large any more, as on a full disk; `_Calls` makes room again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _jump(_fault: PlantedFault) -> None:
    """Every other second is a minute later, for this process."""
    real = time.time
    time.time = lambda: real() + 60 * (int(real()) % 2)


def _die_saving(fault: PlantedFault) -> None:
    """Is killed at the next moment at which a checkpoint's files are to be on the disk."""
    fault.done.unlink()
    sync = os.fsync

    def die(descriptor: int) -> None:
        with suppress(OSError):
            sync(descriptor)
        fault.done.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die


_DEEDS = {
    "kill": lambda _fault: os.kill(os.getpid(), signal.SIGKILL),
    "kill-agent": lambda _fault: os.kill(os.getppid(), signal.SIGKILL),
    "stop": lambda _fault: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "wait": _wait,
    "memory": _eat,
    "disk": _fill,
    "clock": _jump,
    "save": _die_saving,
}
