"""The faults that a run survives, tried on a run of the user's choice, in a scratch folder."""

import os
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.core.errors import RunError, UserError
from manyhands.core.planted import PlantedFault
from manyhands.core.plugins import did_you_mean
from manyhands.core.scratch import scratch
from manyhands.run.drill_attempt import DrilledRun, to_words
from manyhands.run.drill_faults import FAULTS as PLANTED
from manyhands.run.drill_faults import Fault, judged, memory_group, to_its_end
from manyhands.run.drill_hosts import Hosts
from manyhands.run.drill_jobs import JOB_FAULTS
from manyhands.run.drill_machines import MACHINE_FAULTS

# Fewer updates leave no room before and behind a fault.
FEWEST_UPDATES = 200
FAULTS = sorted((*PLANTED, *JOB_FAULTS, *MACHINE_FAULTS), key=lambda fault: fault.row)


@dataclass(frozen=True)
class Verdict:
    """Of one fault."""

    fault: Fault  # its row
    wrong: str = ""  # what doesn't hold; empty: all does
    said: str = ""  # what the run said last
    lacks: str = ""  # why it was not tried; empty: it was
    back_s: float | None = None  # from the fault to the next update of a process started after it
    lost: int | None = None  # updates that were made twice

    @property
    def word(self) -> str:
        """In one word."""
        return "not tried" if self.lacks else "fails" if self.wrong else "holds"

    @property
    def told(self) -> str:
        """In one line."""
        back = "" if self.back_s is None else f", trained again after {self.back_s:.1f} s"
        lost = "" if self.lost is None else f", updates made twice: {self.lost}"
        why = f": {self.lacks or self.wrong}" if self.lacks or self.wrong else ""
        return f"{self.word}{back}{lost}{why}" + (f"; it said last: {self.said}" if self.wrong else "")

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        fault = {
            "row": self.fault.row,
            "name": self.fault.name,
            "does": self.fault.does,
            "expected": self.fault.expected,
        }
        found = {"verdict": self.word, "wrong": self.wrong, "lacks": self.lacks}
        return {**fault, **found, "back_s": self.back_s, "updates_lost": self.lost}


def table_of(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each fault."""
    lines = [("#", "fault", "verdict", "back after", "lost", "expected")]
    for one in verdicts:
        back = "" if one.back_s is None else f"{one.back_s:.1f} s"
        lost = "" if one.lost is None else str(one.lost)
        lines.append(
            (str(one.fault.row), one.fault.name, one.word, back, lost, one.lacks or one.wrong or one.fault.expected)
        )
    widths = [max(len(line[place]) for line in lines) for place in range(5)]
    return ["  ".join([*map(str.ljust, line[:5], widths), line[5]]).rstrip() for line in lines]


def chosen_faults(words: str) -> list[Fault]:
    """The named ones, in the order of the table; all where none is named. UserError: there is none of a name."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    known = [fault.name for fault in FAULTS]
    for name in names:
        if name not in known:
            mend = (did_you_mean(name, known) or f"one of {', '.join(known)}",)
            raise UserError(f'there is no fault "{name}"', "--faults", mend)
    return [fault for fault in FAULTS if not names or fault.name in names]


def drill(
    words: Sequence[str], faults: Sequence[Fault], seed: int, tell: Callable[[str], None], keep: Path | None = None
) -> Iterator[Verdict]:
    """Tries one fault after the other, each on a run of its own, beside one without a fault.

    Args:
        words: of `manyhands train`.
        faults: to try.
        seed: decides when each comes, and on which process.
        tell: what is being done.
        keep: a new folder for all that is done; None: nothing is kept.
    """
    given = to_words(words)
    with nullcontext(_new(keep)) if keep else scratch("drill") as folder:
        tell(f"the run without a fault: manyhands train {shlex.join(given)}")
        whole = _undisturbed(given, folder)
        if whole.updates < FEWEST_UPDATES:
            mend = ("more --epochs, or a smaller --batch",)
            raise UserError(f"{whole.updates} updates are too few: {FEWEST_UPDATES} at least", "drill", mend)
        for fault in faults:
            if lacks := fault.lacks():
                yield Verdict(fault, lacks=lacks)
                continue
            tell(f"{fault.name}: {fault.does}; expected: {fault.expected}")
            yield _tried(fault, whole, random.Random(f"{seed}:{fault.name}"))


def _new(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} can't be made: {error.strerror}", "--keep", ("name a new folder",)) from error
    return folder.absolute()


def _undisturbed(words: Sequence[str], folder: Path) -> DrilledRun:
    """The run in which nothing goes wrong; before it a single update, from which the network is known."""
    first = DrilledRun(words, folder / "first")
    with _ended(first):
        first.start("train.max_steps=1")
        first.wait()
    if first.code:
        raise _refused(first)
    network = first.network()
    nothing = PlantedFault(
        folder=str(folder / "whole"),
        group=str(memory_group(f"manyhands-drill-{os.getpid()}")),
        model={"name": network.name, "arguments": network.arguments},
        channels=network.pictures.channels,
        size=network.pictures.size,
    )
    whole = DrilledRun(words, folder / "whole", nothing)
    with _ended(whole):
        to_its_end(whole)
    if whole.code:
        raise _refused(whole)
    return whole


def _tried(fault: Fault, whole: DrilledRun, draw: random.Random) -> Verdict:
    """Some time in the middle of the run, on any process."""
    folder, processes = whole.folder.with_name(fault.name), whole.environment()["processes"]
    rank = draw.randrange(processes) if fault.rank is None else fault.rank
    # What takes machines a minute begins early enough.
    early = 6 if fault.machines else 2
    call = draw.randrange(whole.updates // early, whole.updates * (2 if fault.machines else 4) // 6)
    assert whole.plant
    planted = replace(whole.plant, what=fault.plants, rank=rank, call=call, always=fault.always, folder=str(folder))
    attempt = DrilledRun(whole.words, folder, planted)
    with _ended(attempt), Hosts(folder.with_suffix(".hosts")) if fault.machines else nullcontext() as attempt.hosts:
        try:
            (fault.act or to_its_end)(attempt)
            wrong = judged(fault, attempt, whole)
        except RunError as error:
            wrong = error.what
        return Verdict(fault, wrong, attempt.said.strip().rpartition("\n")[2], "", attempt.back_s, attempt.lost(whole))


@contextmanager
def _ended(attempt: DrilledRun) -> Iterator[None]:
    """No process of an attempt outlives it."""
    try:
        yield
    finally:
        attempt.end()


def _refused(whole: DrilledRun) -> UserError:
    """The run can't be done even without a fault."""
    error = UserError("the run fails without any fault too", "drill", ("see below; mend that first",))
    error.add_note(whole.said)
    return error
