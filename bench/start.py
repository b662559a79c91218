"""Time from the command to the first update of the DDP introduction's job on 2 processes, in several tools.

    MANYHANDS_DATA=DIR python -m bench.start [--rounds 7] [--also OTHER_CHECKOUT] [--out FILE.json]

All take turns within each round, in another order each time. `torchrun` starts the shortest script that trains this job
under DDP, `document` is the script of the tutorial, which starts its processes itself; `--also` names another checkout
of this program, an earlier one say.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from bench.mnist_mlp import contenders, first_step_at, prepare, run_manyhands, run_script, say
from bench.tables import keep, table


def seconds(name, given, scratch):
    """From the command to the end of its first update; None where it failed."""
    started = time.time()
    if name in {"torchrun", "document"}:
        script = next(one for one in contenders(scratch) if one.name == {"torchrun": "bare"}.get(name, name))
        ended = run_script(script, 0, scratch).get("first_step_at")
    else:
        source = Path(given.also).resolve() / "src" if name == "also" else None
        folder = run_manyhands(given.data_dir, 1, scratch, source=source)
        ended = first_step_at(folder) if folder else None
    return ended - started if ended else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("MANYHANDS_DATA", ""), help="where mnist/ lies")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--also", help="another checkout of this program")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names = ["manyhands", "torchrun", "document", *(["also"] if given.also else [])]
    found = {name: [] for name in names}
    scratch = Path(tempfile.mkdtemp(prefix="manyhands-bench-"))
    try:
        prepare(given.data_dir, scratch)
        for number in range(given.rounds):
            for name in random.sample(names, len(names)):
                found[name].append(seconds(name, given, scratch))
                took = f"{found[name][-1] or 0:>7.2f} s   load {os.getloadavg()[0]:.1f}"
                say(f"round {number + 1}: {name:<10} {took}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(table(found, {}, "first step, s"))
    if given.out:
        keep(given.out, found, "s")


if __name__ == "__main__":
    main()
