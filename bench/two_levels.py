"""What two levels of averaging gain between machines with several processes each.

    python -m bench.two_levels OUT.jsonl [--rates none,1000mbit,100mbit] [--rounds 4]
    python -m bench.two_levels OUT.jsonl --table

Two hosts, network namespaces whose link is that fast in each direction (needs root), with two processes each and one
thread per process. Both ways of averaging under the mode `data`, DDP over gloo's flat ring and DDP in two levels, take
turns within each round, in an order that is turned around from round to round; so ratios count. Networks: document
001's (784-256-10) and one of 10 million parameters (784-2800-2800-10), 32 random pictures for each process.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from pathlib import Path

from tests.network.lab import Lab, why_not

from bench.slow_links import crew, limit, read, tell

MACHINES = [[0, 1], [2, 3]]
NETWORKS = ("784-256-10", "784-2800-2800-10")
WAYS = {"gloo": False, "two levels": True}
PICTURES = 32


def main():
    given = arguments()
    if not given.table:
        if reason := why_not():
            sys.exit(f"bench.two_levels can't be done here: {reason}")
        # So that processes and namespaces go with this one when it is told to end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        with Lab(hosts=len(MACHINES)) as lab, crew(lab, sum(map(len, MACHINES)), "bench.levels_worker") as workers:
            for rate in given.rates.split(","):
                limit(lab, None if rate == "none" else rate)
                for number in range(given.rounds):
                    take_round(lab, workers, rate, number, given.out)
            limit(lab, None)
    show(read(given.out))


def take_round(lab, workers, rate, number, out):
    """Every network both ways, and what a run would choose by itself."""
    chosen, *_ = tell(workers, do="choose")
    turns = [(network, way) for network in NETWORKS for way in WAYS]
    for network, way in turns if number % 2 == 0 else reversed(turns):
        before, load = lab.sent_bytes(1), os.getloadavg()[0]
        measured = tell(workers, do="measure", network=network, way=way)
        # One more is made to see how long it takes.
        sent_bytes = (lab.sent_bytes(1) - before) / (len(measured[0]["seconds"]) + 1)
        record = {
            "rate": rate,
            "network": network,
            "way": way,
            "round": number,
            "seconds": measured[0]["seconds"],
            "cpu_s": sum(each["cpu_s"] for each in measured) / len(measured),
            "sent_bytes": sent_bytes,
            "load": load,
            "timed": chosen[network],
        }
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        print(
            f"{rate} {network} {way}: {statistics.median(record['seconds']) * 1e3:.3g} ms, load {load:.1f}", flush=True
        )


def show(records):
    """A row for each rate and network: medians of an update's time in each round, and of their ratios."""
    print("| link | network | gloo, ms | two levels, ms | ratio by round | sent by a host | a message alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rate, network in dict.fromkeys((one["rate"], one["network"]) for one in records):
        mine = [one for one in records if (one["rate"], one["network"]) == (rate, network)]
        by_way = {way: sorted((one for one in mine if one["way"] == way), key=lambda one: one["round"]) for way in WAYS}
        medians = {way: [statistics.median(one["seconds"]) for one in each] for way, each in by_way.items()}
        ratios = [levels / flat for flat, levels in zip(medians["gloo"], medians["two levels"], strict=True)]
        sent = [statistics.median(one["sent_bytes"] for one in each) / 1e6 for each in by_way.values()]
        alone = [one["timed"][0] / one["timed"][1] for one in by_way["gloo"]]
        words = [
            *(f"{statistics.median(each) * 1e3:.3g} ({spread(by_way[way])})" for way, each in medians.items()),
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{sent[0]:.3g} and {sent[1]:.3g} MB",
            ", ".join(f"{ratio:.2f}" for ratio in alone),
        ]
        print(f"| {rate} | {network} | {' | '.join(words)} |")


def spread(records):
    """The 20th and 80th percentile of all updates' milliseconds."""
    cuts = statistics.quantiles([seconds * 1e3 for one in records for seconds in one["seconds"]], n=5)
    return f"{cuts[0]:.3g} to {cuts[-1]:.3g}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", default="none,1000mbit,100mbit")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="shows what OUT.jsonl has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
