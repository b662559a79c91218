"""Gives spoilt files to every reader of files from outside: none may end in a traceback, hang, or take a gigabyte.

    python -m bench.fuzz_readers --seconds 600 --seed 1
    python -m bench.fuzz_readers --case rank-table:1:4711     one case again, with its traceback

Each reader runs in a process of its own that may take no more than a gigabyte in all. A case is known by reader, seed
and number. What a reader says of a spoilt file must be an error of ours, of one screen, which no terminal obeys.
"""

import argparse
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.fuzz_mutations import spoil_bytes, spoil_json
from manyhands.core.errors import ManyhandsError
from manyhands.data.packed import DAMAGED

MEMORY_BYTES = 1_000_000_000
PATIENCE_S = 60.0  # of a machine so busy that a second of work, a picture of a report, takes long
SCREEN = 40  # lines
MOST_TOLD = 20
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Hang(BaseException):
    """A reader took too long; not an Exception, so that no reader catches it."""


@dataclass
class Reader:
    """One reader of files.

    Attributes:
        name: of the reader.
        write: writes sound files into a folder.
        read: reads them.
        finish: makes spoilt files look whole again (digests, compression), so that the next check is reached.
        only: a pattern of the names of files to spoil.
    """

    name: str
    write: Callable[[Path, random.Random], None]
    read: Callable[[Path], Any]
    finish: Callable[[Path, random.Random], None] | None = None
    only: str = "*"


@dataclass
class Told:
    """What became of one reader's cases."""

    cases: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    faults: list[str] = field(default_factory=list)


def spoil(folder: Path, reader: Reader, rng: random.Random) -> None:
    """Spoils one or two of the files in a folder."""
    files = sorted(path for path in folder.rglob(reader.only) if path.is_file() and not path.is_symlink())
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
        way = rng.random()
        if way < 0.03:
            _replace(path, folder, rng)
        elif way < 0.5 and path.suffix in {".json", ".jsonl"}:
            lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
            at = rng.randrange(len(lines)) if lines else 0
            path.write_bytes(
                b"\n".join(spoil_json(line, rng) if i == at else line for i, line in enumerate(lines)) + b"\n"
            )
        else:
            path.write_bytes(spoil_bytes(path.read_bytes(), rng))


def _replace(path: Path, folder: Path, rng: random.Random) -> None:
    """Puts something else in a file's place."""
    path.unlink()
    way = rng.choice(("gone", "folder", "pipe", "loop", "device", "other"))
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "loop":
        path.symlink_to(path.name)
    elif way == "device":
        path.symlink_to("/dev/zero")
    elif way == "other":
        others = [other for other in folder.rglob("*") if other.is_file()]
        if others:
            shutil.copy(rng.choice(others), path)


def one_case(reader: Reader, seed: int, number: int, folder: Path) -> str:
    """Makes one case and has it read; returns what was wrong, or an empty string."""
    rng = random.Random(f"{reader.name}:{seed}:{number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        reader.write(folder, rng)
        spoil(folder, reader, rng)
        ordinary = all(path.is_dir() or (path.is_file() and not path.is_symlink()) for path in folder.rglob("*"))
        if reader.finish and ordinary and rng.random() < 0.9:
            with suppress(OSError, AttributeError, *DAMAGED):
                reader.finish(folder, rng)
        reader.read(folder)
    except ManyhandsError as error:
        return _judged(str(error))
    except Hang:
        return f"took more than {PATIENCE_S:.0f} s\n{_end_of(traceback.format_exc())}"
    except MemoryError:
        return f"took more than {MEMORY_BYTES / 1e9:.0f} GB\n{_end_of(traceback.format_exc())}"
    except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
        return f"a traceback\n{_end_of(traceback.format_exc())}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def _judged(said: str) -> str:
    if _OBEYED.search(said):
        return f"an error with what a terminal obeys: {said[:200]!r}"
    if said.count("\n") > SCREEN or len(said) > 100 * SCREEN:
        return f"an error of more than a screen: {said[:300]!r}"
    return ""


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-7:])


def _raise_hang(*_: object) -> None:
    raise Hang


def _work(reader: Reader, seed: int, first: int, seconds: float, scratch: Path, outbox: Any) -> None:
    """Runs cases in this process until the time is over; says what each was before it begins."""
    _limit_memory()
    signal.signal(signal.SIGALRM, _raise_hang)
    warnings.simplefilter("ignore")
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    began, number = time.monotonic(), first
    while time.monotonic() - began < seconds:
        outbox.send((number, None))
        problem = one_case(reader, seed, number, scratch / "case")
        if problem:
            outbox.send((number, problem))
        number += 1
    outbox.send((number, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def _limit_memory() -> None:
    """As much address space as leaves the process under the limit, whatever its libraries have mapped by now."""
    used = psutil.Process().memory_info()
    limit = used.vms + MEMORY_BYTES - used.rss
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def fuzz(reader: Reader, seed: int, seconds: float, told: Told) -> None:
    """Has a reader read spoilt files for so long; a process that ends or hangs is followed by another."""
    context = multiprocessing.get_context("fork")
    began, number, seen = time.monotonic(), 0, set()
    while (left := seconds - (time.monotonic() - began)) > 0 or not told.cases:
        inbox, outbox = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="manyhands-fuzz-") as scratch:
            process = context.Process(target=_work, args=(reader, seed, number, max(left, 0.2), Path(scratch), outbox))
            process.start()
            outbox.close()
            number = _listen(reader, seed, number, inbox, process, told, seen)
            process.kill()
            process.join()
    told.seconds = time.monotonic() - began


def _listen(reader: Reader, seed: int, number: int, inbox: Any, process: Any, told: Told, seen: set[str]) -> int:
    """Takes in what a process says of its cases until it ends; the number of the next case."""
    while True:
        if not inbox.poll(2 * PATIENCE_S):
            _note(reader, seed, number, "hung, where no signal reaches", told, seen)
            return number + 1
        try:
            number, what = inbox.recv()
        except EOFError:
            process.join()
            _note(reader, seed, number, f"ended its process with {process.exitcode}", told, seen)
            return number + 1
        if isinstance(what, int):
            told.peak_bytes = max(told.peak_bytes, what)
            return number
        if what is None:
            told.cases += 1
        else:
            _note(reader, seed, number, what, told, seen)


def _note(reader: Reader, seed: int, number: int, problem: str, told: Told, seen: set[str]) -> None:
    """Keeps a fault, once for each place that it comes from."""
    place = "".join(re.findall(r"File \"[^\"]*\", line \d+", problem)[-1:]) or problem[:60]
    if place not in seen and len(told.faults) < MOST_TOLD:
        seen.add(place)
        told.faults.append(f"--case {reader.name}:{seed}:{number}  {problem}")


def main() -> int:
    """Fuzzes all readers, or some, in turns; 1 where anything was found."""
    from bench.fuzz_specimens import READERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="readers whose names hold this")
    parser.add_argument("--case", default="", help="READER:SEED:NUMBER, once more")
    given = parser.parse_args()
    readers = {reader.name: reader for reader in READERS}
    if given.case:
        name, seed, number = given.case.rsplit(":", 2)
        signal.signal(signal.SIGALRM, _raise_hang)
        with tempfile.TemporaryDirectory(prefix="manyhands-fuzz-") as scratch:
            found = one_case(readers[name], int(seed), int(number), Path(scratch) / "case")
            kept = Path(tempfile.gettempdir()) / f"fuzz-{name}-{seed}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(Path(scratch) / "case", kept, symlinks=True, ignore=_no_pipes)
        print(found or "nothing wrong", f"\nthe files are in {kept}")
        return int(bool(found))
    chosen = [reader for name, reader in readers.items() if given.only in name]
    faults = 0
    for reader in chosen:
        told = Told()
        fuzz(reader, given.seed, given.seconds / len(chosen), told)
        faults += len(told.faults)
        print(
            f"{reader.name:<18} {told.cases:>7} cases  {told.seconds:6.1f} s  {told.peak_bytes / 1e6:5.0f} MB at most  "
            f"{len(told.faults)} faults",
            flush=True,
        )
        for fault in told.faults:
            print(f"  {fault}", flush=True)
    print(f"{faults} faults")
    return int(faults > 0)


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder) / name).is_file() and not (Path(folder) / name).is_dir()]


if __name__ == "__main__":
    sys.exit(main())
