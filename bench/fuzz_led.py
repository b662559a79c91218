"""Spoilt files for every reader, led by which of our code each reaches (atheris), beside `bench.fuzz_readers`.

    python -m bench.fuzz_led --seconds 600

Each reader has a process of its own, since the fuzzer ends the one that it runs in. What is found can be had again by
the file that the fuzzer names: python -m bench.fuzz_led --only job FILE
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

try:
    import atheris
except ImportError:
    print("atheris is not there: pip install atheris; nothing was tried")
    sys.exit(0)

# It says of each module that it has read it in.
with atheris.instrument_imports(include=["manyhands"]) if "--alone" in sys.argv else nullcontext():
    from bench.fuzz_readers import PATIENCE_S, Reader
    from bench.fuzz_specimens import READERS
from manyhands.core.errors import ManyhandsError

# These draw what they spoil themselves, or take what isn't a file.
BY_CHANCE_ALONE = {"words"}


def spoilt_file(reader: Reader, folder: Path) -> Path:
    """The file of sound ones that the fuzzer's bytes replace."""
    return sorted(path for path in folder.rglob(reader.only) if path.is_file())[0]


def work(reader: Reader, words: list[str]) -> None:
    """Fuzzes one reader in this process until the fuzzer ends it."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="manyhands-fuzz-") as scratch:
        sound, case, corpus = (Path(scratch) / name for name in ("sound", "case", "corpus"))
        sound.mkdir()
        corpus.mkdir()
        reader.write(sound, random.Random(1))
        place = spoilt_file(reader, sound)
        shutil.copy(place, corpus / "sound")

        def one(content: bytes) -> None:
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(sound, case)
            (case / place.relative_to(sound)).write_bytes(content)
            with suppress(ManyhandsError):
                reader.read(case)

        atheris.Setup([sys.argv[0], f"-timeout={PATIENCE_S:.0f}", "-rss_limit_mb=4000", *words, str(corpus)], one)
        atheris.Fuzz()


def main() -> int:
    """All readers in turns; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all readers together")
    parser.add_argument("--only", default="", help="readers whose names hold this")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    given, words = parser.parse_known_args()
    readers = {reader.name: reader for reader in READERS if reader.name not in BY_CHANCE_ALONE}
    if given.alone:
        work(readers[given.alone], words)
        return 0
    chosen = [name for name in readers if given.only in name]
    faults = 0
    for name in chosen:
        seconds = max(1, given.seconds // len(chosen))
        command = [sys.executable, "-m", "bench.fuzz_led", "--alone", name, f"-max_total_time={seconds}", *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        told = [line for line in done.stderr.splitlines() if line.startswith("Done ")]
        print(f"{name:<18} {told[-1] if told else ''}{'' if done.returncode == 0 else f' FAULT ({done.returncode})'}")
        if done.returncode and done.returncode != -signal.SIGINT:
            faults += 1
            print((done.stdout + done.stderr)[-3000:], flush=True)
    print(f"{faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
