"""How far random plans are from one process: python -m bench.parity OUT.jsonl [--networks …] [--meshes …] [--plans 10].

Appends a line for each network and mesh to OUT.jsonl, goes on where it was stopped, and prints the table of all lines.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from tests.processes.parity import NETWORKS, errors, rounding

MESHES = {
    "2": (("dp", 2),),
    "4": (("dp", 4),),
    "2x2": (("dp", 2), ("tp", 2)),
    "2x2x2": (("dp", 2), ("tp", 2), ("tp2", 2)),
}


def measure(name, mesh, plans, updates):
    """One line of the table: data parallel (seed -1) and random plans, in double precision and then in single."""
    began = time.monotonic()
    wide = errors(name, MESHES[mesh], range(-1, plans), updates)
    narrow = errors(name, MESHES[mesh], range(-1, min(plans, 2)), 1, torch.float32)
    noise = rounding(name, updates)
    return {
        "network": name,
        "mesh": mesh,
        "plans": plans,
        "updates": updates,
        "first": max(one.first for one in wide[1:]),
        "last": max(one.last for one in wide[1:]),
        "data_parallel": max(wide[0].first[0], wide[0].last[0]),
        "single": max(one.first for one in narrow[1:]),
        "single_data_parallel": narrow[0].first[0],
        "rounding": max(noise.first[0], noise.last[0]),
        "took_s": round(time.monotonic() - began),
    }


def table(lines):
    """Markdown."""
    head = (
        "| network | mesh | plans | double, 1 update | after 5 | data parallel | rounding alone | single, 1 update "
        "| data parallel |"
    )
    rows = [head, "|" + " --- |" * 9]
    for one in lines:
        numbers = [one[key] for key in ("first", "last", "data_parallel", "rounding", "single", "single_data_parallel")]
        shown = [f"{number[0] if isinstance(number, list | tuple) else number:.1e}" for number in numbers]
        rows.append(f"| {one['network']} | {one['mesh']} | {one['plans']} | {' | '.join(shown)} |")
    return "\n".join(rows)


def main():
    """Measures what is missing in the file, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--meshes", nargs="*", default=list(MESHES))
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(one["network"], one["mesh"]) for one in lines}
    for name in options.networks:
        for mesh in options.meshes:
            if (name, mesh) not in done:
                lines.append(measure(name, mesh, options.plans, options.updates))
                with options.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
