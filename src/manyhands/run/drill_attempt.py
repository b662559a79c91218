"""One run of a drill: started in a folder of its own, watched to its end, and what came of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
from safetensors.numpy import load_file

from manyhands.core.errors import RunError, UserError
from manyhands.core.folder import RunFolder
from manyhands.core.planted import PlantedFault
from manyhands.core.records import read_lines
from manyhands.core.trained import TrainedNetwork
from manyhands.run.drill_hosts import Hosts

# Whatever is tried ends by itself long before, or hangs.
PATIENCE_S = 180.0
# After a run nothing of it may be left for longer.
GONE_S = 10.0
# Rounding in double precision, without momentum, which would let it grow.
ROUNDING = 1e-6
EXACT = ("train.precision=fp64", "train.momentum=0", "train.nesterov=false", "train.channels_last=false")
EVERY_UPDATES = 20
PROCESSES = ("-n", "--processes")
SHORT = ("run.report=false", f"checkpoint.every={EVERY_UPDATES}steps")


@dataclass
class DrilledRun:
    """A run, and what became of it."""

    words: Sequence[str]  # the user's, of `manyhands train`
    folder: Path  # of this attempt: the run is in `run`
    plant: PlantedFault | None = None  # what is to go wrong in it
    hosts: Hosts | None = None  # that it may run on; None: it runs here
    machines: Sequence[str] = ()  # of the hosts, on which it begins
    code: int | None = None  # of its end; None before it
    ended_s: float = 0.0  # from the fault to the run's end
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def run(self) -> RunFolder:
        """Where it is recorded."""
        return RunFolder(self.folder / "run")

    @property
    def said(self) -> str:
        """All that it has told the user."""
        return (self.folder / "said").read_text(errors="replace")

    def start(self, *settings: str) -> None:
        """Starts to train."""
        model = [f"model.name={_network()}:network"] if self.plant else []
        chosen = [word for value in (*EXACT, *SHORT, *model, *settings) for word in ("--set", value)]
        words = ["train", *self.words]
        if self.hosts:
            place = ("--hosts", ",".join(self.machines), "--elastic", "1:3", "--cluster.ssh", self.hosts.ssh)
            words = ["launch", *without_processes(self.words), *place]
        self.command(*words, *chosen, "--out", str(self.run.path))

    def command(self, *words: str, where: Path | None = None) -> "subprocess.Popen[bytes]":
        """Starts any command of ours, with the fault in its environment; what it says is added.

        Args:
            words: of it.
            where: the folder to start it in, if it is there.
        """
        variables = self.plant.as_variable() if self.plant else {}
        environment = {**os.environ, **variables, "MANYHANDS_LANG": "en", "DRILL_FOLDER": str(self.folder)}
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "manyhands", *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                cwd=where if where and where.exists() else None,
            )
        return self.process

    def wait(self) -> None:
        """Waits for the end. RunError: it hangs."""
        assert self.process
        try:
            self.code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"it had not ended after {PATIENCE_S:.0f} s") from None
        self.ended_s = time.time() - self.fault_at if self.fault_at else 0.0

    def wait_for_fault(self) -> None:
        """Waits until it has been done. RunError: the run ended before, or hangs."""
        assert self.plant
        assert self.process
        until = time.monotonic() + PATIENCE_S
        while not self.plant.done.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RunError("the run ended before the fault, or hung")
            time.sleep(0.02)

    def end(self) -> None:
        """Ends whatever is left of it."""
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()
        if self.process:
            self.process.kill()
            self.process.wait()

    def left(self) -> list[psutil.Process]:
        """Its processes, wherever they are by now."""
        mine = f"DRILL_FOLDER={self.folder}".encode()
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if mine in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def orphans(self) -> list[psutil.Process]:
        """Those that are there still, some time after the end."""
        until = time.monotonic() + GONE_S
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def ask_to_stop(self) -> None:
        """As a scheduler does that wants the machine back."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)

    # What came of it.

    @property
    def fault_at(self) -> float:
        """When it was done, in seconds since 1970; 0 where it wasn't."""
        done = self.plant.done if self.plant else None
        return done.stat().st_mtime if done and done.exists() else 0.0

    @property
    def back_s(self) -> float | None:
        """From the fault to the next pass of training of a process that was started after it."""
        again = self.plant.again if self.plant and not self.plant.always else None
        return again.stat().st_mtime - self.fault_at if again and again.exists() else None

    def lost(self, whole: "DrilledRun") -> int | None:
        """Updates made twice: all before the stop or the faulty pass, but those that the run went on from."""
        resumed, stopped = self.events("resumed"), self.events("stopped")
        if resumed and stopped and not self.events("regrouped"):
            return stopped[0]["step"] - resumed[-1]["step"]
        if not self.plant or not whole.plant or not resumed or self.plant.always:
            return None
        calls, updates = int(whole.plant.calls.read_text()), whole.updates
        each = calls // updates  # more than one where a batch is taken in several passes
        return max(0, (self.plant.call - 1 - calls % updates) // each - resumed[0]["step"])

    @property
    def updates(self) -> int:
        """Of the whole run, once it has ended."""
        return self.events("finished")[-1]["step"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of this kind, in the diary."""
        return [line for line in read_lines(self.run.events) if line.get("kind") == kind]

    def checkpoints(self) -> list[Path]:
        """The oldest first."""
        return sorted(self.run.checkpoints.glob("step-*"))

    def weights(self) -> "dict[str, numpy.ndarray[Any, Any]]":
        """Of the newest checkpoint. RunError: there is none."""
        if not (found := self.checkpoints()):
            raise RunError("there is no checkpoint")
        return load_file(found[-1] / "model.safetensors")

    def difference(self, other: "DrilledRun") -> float:
        """The greatest between the weights of two runs, relative to the greatest weight of each tensor."""
        mine, others = self.weights(), other.weights()
        if mine.keys() != others.keys():
            return float("inf")
        return max(_relative(one, others[name]) for name, one in mine.items())

    def network(self) -> TrainedNetwork:
        """What the run has trained."""
        return TrainedNetwork.model_validate_json(self.run.network.read_text())

    def environment(self) -> dict[str, Any]:
        """What env.json says."""
        return json.loads(self.run.environment.read_text())

    def listeners(self) -> Iterator[tuple[str, int]]:
        """Addresses on which its processes listen."""
        for process in self.left():
            with suppress(psutil.Error):
                for one in process.net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN and one.laddr:
                        yield one.laddr.ip, one.laddr.port


def _relative(one: "numpy.ndarray[Any, Any]", other: "numpy.ndarray[Any, Any]") -> float:
    if one.shape != other.shape or not one.size:
        return 0.0 if one.shape == other.shape else float("inf")
    scale = float(numpy.abs(other).max()) or 1.0
    found = float(numpy.abs(one.astype(float) - other.astype(float)).max()) / scale
    return found if found == found else float("inf")


def _network() -> Path:
    return Path(__file__).parents[1] / "worker" / "faulty_network.py"


def to_words(words: Sequence[str]) -> list[str]:
    """The words of `manyhands train` for the user's: on two processes and digits where nothing else is said.

    Raises:
        UserError: they name a run folder, or a checkpoint, which a drill leaves alone.
    """
    for word in words:
        if word.partition("=")[0] in {"--out", "--resume", "--init", "--json", "--dry-run", "--show-config"}:
            raise UserError(f"a drill makes its own runs, so it takes no {word}", "drill", ("leave it out",))
    given = list(words) or ["digits", "mlp", "--epochs", "12"]
    return given if any(word.startswith(PROCESSES) for word in given) else [*given, "-n", "2"]


def without_processes(words: Sequence[str]) -> list[str]:
    """Machines have one each."""
    kept: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if not word.startswith(PROCESSES) and before not in PROCESSES:
            kept.append(word)
    return kept
