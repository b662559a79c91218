"""The faults of a drill: what is done, what is expected, and how it is judged."""

import os
import pickle
import random
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.core.errors import EXIT_FAILED, EXIT_OK, EXIT_SAVED, EXIT_USAGE, RunError
from manyhands.core.planted import RAISED
from manyhands.run.drill_attempt import EVERY_UPDATES, ROUNDING, DrilledRun

# What is promised of a stop, and what a busy machine may take beyond it.
STOP_S, BUSY_S = 5.0, 5.0
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LITTLE_BYTES = 64 << 20


@dataclass(frozen=True)
class Fault:
    """One row."""

    row: int  # its number in docs/experiments/faults.md
    name: str  # as it is asked for
    does: str  # what is done
    expected: str  # what is to come of it
    # of an attempt that has ended and the undisturbed one, what doesn't hold; empty: all does
    judge: Callable[[DrilledRun], str]
    plants: str = ""  # what goes wrong within the run; empty: nothing
    rank: int | None = None  # on which; None: any
    always: bool = False  # at each start
    # starts the attempt, does what there is to do from outside, and waits for the end
    act: Callable[[DrilledRun], None] | None = None
    lacks: Callable[[], str] = str  # why it can't be tried here; empty: it can
    equal: bool = True  # whether the final weights are to be those of the undisturbed run
    most_lost: int = 1  # updates that may be made twice
    machines: bool = False  # whether it is tried on three machines, which are namespaces of this one


def to_its_end(attempt: DrilledRun) -> None:
    """Nothing is done from outside."""
    attempt.start()
    attempt.wait()


def ended_with(attempt: DrilledRun, code: int = EXIT_OK) -> str:
    return "" if attempt.code == code else f"it ended with {attempt.code}, not {code}"


def _goes_on(attempt: DrilledRun) -> str:
    """By one new start, with at most one update lost."""
    if wrong := ended_with(attempt):
        return wrong
    restarts = len(attempt.events("restarted"))
    return "" if restarts == 1 else f"it started again {restarts} times, not once"


def undisturbed(attempt: DrilledRun) -> str:
    return ended_with(attempt) or ("it was started again" if attempt.events("restarted") else "")


def _goes_on_with_warning(attempt: DrilledRun) -> str:
    warned = any("no checkpoint" in line.get("message", "") for line in attempt.events("warning"))
    return undisturbed(attempt) or ("" if warned else "nobody was warned that nothing could be saved")


def _says_memory(attempt: DrilledRun) -> str:
    said = any("memory" in line.get("message", "") for line in attempt.events("restarted"))
    return _goes_on(attempt) or ("" if said else "memory was not named as the cause")


def _stops_after_second(attempt: DrilledRun) -> str:
    if wrong := ended_with(attempt, EXIT_FAILED):
        return wrong
    if len(attempt.events("restarted")) != 1:
        return f"it started again {len(attempt.events('restarted'))} times, not once"
    screen = attempt.said.partition("manyhands: ")[2]
    return "" if screen.count("Traceback") == 1 and RAISED in screen else "there isn't one traceback with the error"


def _left_out_by_all(attempt: DrilledRun) -> str:
    """One update, with its rank named; never weights that are no numbers."""
    assert attempt.plant
    left_out = attempt.events("left-out")
    if wrong := undisturbed(attempt):
        return wrong
    if len(left_out) != 1 or f"rank {attempt.plant.rank}" not in left_out[0]["message"]:
        return f"{len(left_out)} updates were left out, not one with its rank named"
    return _whole_weights(attempt)


def _whole_weights(attempt: DrilledRun) -> str:
    weights = attempt.weights() if attempt.checkpoints() else {}
    whole = all(bool((abs(one) < float("inf")).all()) for one in weights.values())
    return "" if whole else "weights that are no numbers were saved"


def _stop_and_resume(attempt: DrilledRun, spoil: Callable[[Path], object] | None = None) -> None:
    """SIGTERM in the middle, something done to the newest checkpoint, and `manyhands resume`."""
    assert attempt.plant
    attempt.start()
    attempt.wait_for_fault()
    attempt.ask_to_stop()
    attempt.plant.go.touch()
    attempt.wait()
    if attempt.code != EXIT_SAVED:
        raise RunError(f"SIGTERM ended it with {attempt.code}, not {EXIT_SAVED}")
    stopped_s = attempt.ended_s
    if spoil:
        spoil(attempt.checkpoints()[-1])
    attempt.command("resume", str(attempt.run.path))
    attempt.wait()
    attempt.ended_s = stopped_s


def _stopped_in_time(attempt: DrilledRun) -> str:
    late = attempt.ended_s > STOP_S + BUSY_S
    return ended_with(attempt) or (f"it took {attempt.ended_s:.1f} s to save and stop" if late else "")


def _took_the_one_before(attempt: DrilledRun) -> str:
    stopped, resumed = attempt.events("stopped"), attempt.events("resumed")
    if not resumed or resumed[-1]["step"] >= stopped[0]["step"]:
        return ended_with(attempt) or "the altered checkpoint was taken"
    return ended_with(attempt)


def _flip(checkpoint: Path) -> None:
    """One bit of one byte, in the middle of the weights."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


class Harmless:
    """What unpickling it would do is to touch a file, and nothing else."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """A shell's command, as a stranger would have it."""
        return os.system, (f"touch '{self.marker}'",)


def _start_from_pickle(attempt: DrilledRun) -> None:
    attempt.folder.mkdir(exist_ok=True)
    file = attempt.folder / "network.pth"
    file.write_bytes(pickle.dumps({"state_dict": Harmless(attempt.folder / "ran")}))
    attempt.start(f"checkpoint.resume={file}")
    attempt.wait()


def _ran_nothing(attempt: DrilledRun) -> str:
    if (attempt.folder / "ran").exists():
        return "the code in it was run"
    return ended_with(attempt, EXIT_USAGE)


def _train_on_pictures(attempt: DrilledRun) -> None:
    """Two classes of eight pictures each, of which one is cut off."""
    pictures = attempt.folder / "pictures"
    for kind, grey in (("cat", 40), ("dog", 200)):
        (pictures / kind).mkdir(parents=True)
        for number in range(8):
            (pictures / kind / f"{number}.png").write_bytes(png(grey, random.Random(number)))
    torn = pictures / "dog" / "5.png"
    torn.write_bytes(torn.read_bytes()[:300])
    attempt.words = [str(pictures), "mlp", "--epochs", "1", "--batch", "4", "-n", "2"]
    attempt.start()
    attempt.wait()


def png(grey: int, draw: random.Random, side: int = 24) -> bytes:
    """A picture of noise about a grey."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + bytes(grey + draw.randrange(40) for _ in range(side)) for _ in range(side))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _names_the_picture(attempt: DrilledRun) -> str:
    named = "5.png" in attempt.said
    return (
        "" if attempt.code and named else f"it ended with {attempt.code}; the file was {'' if named else 'not '}named"
    )


def _talk_junk(attempt: DrilledRun) -> None:
    """To every port that the run's processes listen on, while it trains."""
    assert attempt.plant
    attempt.start()
    attempt.wait_for_fault()
    noise = random.Random(attempt.plant.call).randbytes(1 << 16)
    for address, port in set(attempt.listeners()):
        for words in (noise, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", pickle.dumps({"rank": 0})):
            reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
            with suppress(OSError), socket.create_connection((reached, port), timeout=1) as connection:
                connection.sendall(words)
    attempt.plant.go.touch()
    attempt.wait()


def _starve(attempt: DrilledRun) -> None:
    """In a group of the system's with little memory, which goes with the attempt."""
    assert attempt.plant
    group = Path(attempt.plant.group)
    group.mkdir()
    try:
        version_1 = group / "memory.limit_in_bytes"
        (version_1 if version_1.exists() else group / "memory.max").write_text(str(LITTLE_BYTES))
        to_its_end(attempt)
    finally:
        group.rmdir()


def memory_group(name: str) -> Path:
    """The folder of a group of the system's in which memory may be limited."""
    return next((root for root in CGROUPS if root.is_dir()), CGROUPS[0]) / name


def _no_memory_group() -> str:
    probe = memory_group(f"manyhands-probe-{os.getpid()}")
    try:
        probe.mkdir()
        limits = any((probe / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
        probe.rmdir()
    except OSError:
        limits = False
    return "" if limits else "needs root, and a system that limits memory by groups (cgroup)"


GOES_ON = "goes on by itself, at most one update made twice"
FAULTS: Sequence[Fault] = (
    Fault(1, "kill-rank", "a process is killed", GOES_ON, _goes_on, plants="kill"),
    Fault(6, "kill-rank-0", "the process that writes the records is killed", GOES_ON, _goes_on, plants="kill", rank=0),
    Fault(
        2,
        "kill-agent",
        "the agent that watches the processes is killed",
        "goes on from the last checkpoint",
        _goes_on,
        plants="kill-agent",
        most_lost=EVERY_UPDATES,
    ),
    Fault(11, "stop-rank", "a process is stopped (SIGSTOP)", "is ended, and the run goes on", _goes_on, plants="stop"),
    Fault(12, "raise-once", "a process raises an error, once", GOES_ON, _goes_on, plants="raise"),
    Fault(
        13,
        "raise-always",
        "a process raises an error at every start",
        "ends after the second, with one traceback",
        _stops_after_second,
        plants="raise",
        always=True,
        equal=False,
    ),
    Fault(
        20,
        "nan",
        "a process computes what is no number, once",
        "that update is left out by all, and the rank named; no such weights are saved",
        _left_out_by_all,
        plants="nan",
        equal=False,
    ),
    Fault(
        14,
        "memory",
        "the system kills a process for its memory",
        "reported as such, and goes on",
        _says_memory,
        plants="memory",
        act=_starve,
        lacks=_no_memory_group,
    ),
    Fault(
        15,
        "sigterm",
        "SIGTERM, and resume",
        f"saved within {STOP_S:.0f} s, exit code {EXIT_SAVED}, goes on from there",
        _stopped_in_time,
        plants="wait",
        act=_stop_and_resume,
    ),
    Fault(
        16,
        "kill-saving",
        "the process that saves is killed while it does",
        "the newest whole checkpoint is taken",
        _goes_on,
        plants="save",
        rank=0,
        most_lost=EVERY_UPDATES,
    ),
    Fault(
        17,
        "disk-full",
        "files can't grow for a second",
        "training goes on, loudly warned, what was saved is kept",
        _goes_on_with_warning,
        plants="disk",
        rank=0,
    ),
    Fault(
        18,
        "altered-checkpoint",
        "one bit of the newest checkpoint is turned",
        "refused, the one before is taken",
        _took_the_one_before,
        plants="wait",
        act=lambda attempt: _stop_and_resume(attempt, _flip),
        most_lost=2 * EVERY_UPDATES,
    ),
    Fault(
        18,
        "cut-checkpoint",
        "the newest checkpoint is cut off",
        "refused, the one before is taken",
        _took_the_one_before,
        plants="wait",
        act=lambda attempt: _stop_and_resume(attempt, _truncate),
        most_lost=2 * EVERY_UPDATES,
    ),
    Fault(
        19,
        "pickle-checkpoint",
        "a checkpoint that would run a command",
        "refused, nothing is run",
        _ran_nothing,
        act=_start_from_pickle,
        equal=False,
    ),
    Fault(
        21,
        "corrupt-picture",
        "a picture that is cut off",
        "the file is named, and the run stops",
        _names_the_picture,
        act=_train_on_pictures,
        equal=False,
    ),
    Fault(
        29,
        "junk-to-ports",
        "every port of the run is spoken to with noise",
        "the run is unaffected",
        undisturbed,
        plants="wait",
        act=_talk_junk,
    ),
    Fault(28, "clock", "a process's clock jumps by a minute to and fro", "no effect", undisturbed, plants="clock"),
)


def judged(fault: Fault, attempt: DrilledRun, whole: DrilledRun) -> str:
    """What doesn't hold; empty where all does."""
    if wrong := fault.judge(attempt):
        return wrong
    if left := attempt.orphans():
        return f"{len(left)} processes were left: {left[0].pid}"
    if (lost := attempt.lost(whole) or 0) > fault.most_lost:
        return f"{lost} updates were made twice"
    apart = attempt.difference(whole) if fault.equal else 0.0
    return "" if apart <= ROUNDING else f"the weights differ from the undisturbed run's by {apart:.0e}"
