"""Faults of a drill that have jobs of their own: what is refused before it trains, and what must do no harm."""

import os
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.core.errors import EXIT_DOCTOR, EXIT_USAGE
from manyhands.core.records import read_lines
from manyhands.run.drill_attempt import DrilledRun
from manyhands.run.drill_faults import Fault, ended_with, png

JOB = ("digits", "mlp", "--epochs", "1", "--device", "cpu")
# Digits to train with and to evaluate with: three processes don't divide the first, nor the batch.
TRAINED, EVALUATED, BATCH = 1437, 360, 50
# For a shell: where one reads it a file appears.
TRICK = "$(cd $DRILL_FOLDER; touch ran)"


def _alone(attempt: DrilledRun, *words: str) -> None:
    """One command, and its end."""
    attempt.plant = None
    attempt.command(*words, "--out", str(attempt.run.path))
    attempt.wait()


def _meet(*jobs: Sequence[str]) -> Callable[[DrilledRun], None]:
    """Processes that are started by hand, to meet on loopback; what is told is the code of one that isn't refused."""

    def act(attempt: DrilledRun) -> None:
        attempt.plant = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            at = ("--init", f"tcp://127.0.0.1:{probe.getsockname()[1]}", "--out", str(attempt.run.path))
        started = [attempt.command("train", *words, *at, where=attempt.folder / str(n)) for n, words in enumerate(jobs)]
        codes: set[int] = set()
        for process in started:
            attempt.process = process
            attempt.wait()
            codes.add(attempt.code or 0)
        attempt.code = max(codes - {EXIT_USAGE}, default=EXIT_USAGE)

    return act


def _place(size: int, rank: int) -> tuple[str, ...]:
    return "--world-size", str(size), "--rank", str(rank)


def refused(what: str, code: int = EXIT_USAGE) -> Callable[[DrilledRun], str]:
    """Judges whether it was, by these words."""

    def judge(attempt: DrilledRun) -> str:
        return ended_with(attempt, code) or ("" if what in attempt.said else f'it did not say "{what}"')

    return judge


def _counted_once(attempt: DrilledRun) -> str:
    lines = list(read_lines(attempt.run.metrics))
    counts = [line["count"] for line in lines if line["kind"] == "evaluation"]
    updates = max((line["step"] for line in lines if line["kind"] == "step"), default=0)
    right = counts and set(counts) == {EVALUATED} and updates == -(-TRAINED // BATCH)
    return ended_with(attempt) or ("" if right else f"{updates} updates were made and {counts} samples evaluated")


def _other_classes(attempt: DrilledRun) -> None:
    """Two machines' folders by the same name, one of them with a cow for the dog."""
    for number, classes in enumerate((("cat", "dog"), ("cat", "cow"))):
        _pictures(attempt.folder / str(number) / "pictures", classes)
    job = ("pictures", "mlp", "--epochs", "1", "--device", "cpu")
    _meet(*((*job, *_place(2, rank)) for rank in range(2)))(attempt)


def _pictures(folder: Path, classes: Sequence[str]) -> None:
    for kind in classes:
        (folder / kind).mkdir(parents=True)
        for number in range(8):
            (folder / kind / f"{number}.png").write_bytes(png(100, random.Random(number)))


def _busy_port(attempt: DrilledRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        _alone(attempt, "train", *JOB, "--init", f"tcp://127.0.0.1:{held.getsockname()[1]}", *_place(2, 0))


def _tricky_names(attempt: DrilledRun) -> None:
    """Of classes, files and folders."""
    _pictures(attempt.folder / TRICK, (TRICK, f"`{TRICK[2:-1]}`", f"; {TRICK[2:-1]};"))
    _alone(attempt, "train", str(attempt.folder / TRICK), "mlp", "--epochs", "1", "--batch", "4", "-n", "2")


def _ran_nothing(judge: Callable[[DrilledRun], str]) -> Callable[[DrilledRun], str]:
    return lambda attempt: "a shell obeyed a name" if (attempt.folder / "ran").exists() else judge(attempt)


def _no_ssh() -> str:
    return "" if shutil.which("ssh") else "needs ssh"


JOB_FAULTS: Sequence[Fault] = (
    Fault(
        22,
        "uneven",
        "a batch and a data set that three processes don't divide",
        "no hang, each sample counts once",
        _counted_once,
        act=lambda attempt: _alone(attempt, "train", *JOB, "--batch", str(BATCH), "-n", "3"),
        equal=False,
    ),
    Fault(
        23,
        "other-classes",
        "a machine has other classes",
        "refused before the start, and named",
        refused("rank 1 sees other classes than rank 0"),
        act=_other_classes,
        equal=False,
    ),
    Fault(
        24,
        "other-job",
        "a process has another job",
        "refused before the start, the difference named",
        refused("train.lr ("),
        act=_meet(*((*JOB, "--lr", f"0.{rank + 1}", *_place(2, rank)) for rank in range(2))),
        equal=False,
    ),
    Fault(
        25,
        "other-size",
        "two processes are told other numbers of them",
        "refused before the start, and named",
        refused("differ in --world-size"),
        act=_meet(*((*JOB, *_place(2 + rank, rank)) for rank in range(2))),
        equal=False,
    ),
    Fault(
        25,
        "rank-twice",
        "two processes are given one rank",
        "refused before the start, both named",
        refused("rank 1 is taken by process"),
        act=_meet(*((*JOB, *_place(3, rank)) for rank in (0, 1, 1))),
        equal=False,
    ),
    Fault(
        26,
        "busy-port",
        "another program has the port that is named",
        "refused, with its holder",
        refused(f"is in use by process {os.getpid()}"),
        act=_busy_port,
        equal=False,
    ),
    Fault(
        27,
        "no-host",
        "a machine has no address",
        "refused with one line",
        refused("the name nowhere.invalid has no address here", EXIT_DOCTOR),
        act=lambda attempt: _alone(attempt, "launch", *JOB, "--hosts", "nowhere.invalid"),
        lacks=_no_ssh,
        equal=False,
    ),
    Fault(
        30,
        "shell-in-names",
        "classes and folders are named as a shell's commands",
        "they stay names",
        _ran_nothing(ended_with),
        act=_tricky_names,
        equal=False,
    ),
    Fault(
        30,
        "shell-in-hosts",
        "a machine is named as an option of ssh that runs a command",
        "refused, nothing is run",
        _ran_nothing(lambda attempt: ended_with(attempt, EXIT_USAGE)),
        act=lambda attempt: _alone(attempt, "launch", *JOB, "--hosts", f"-oProxyCommand={TRICK}"),
        equal=False,
    ),
)
