"""What training costs on slow links: ways of agreeing side by side, on links of several speeds.

    python -m bench.slow_links OUT.jsonl [--rates 10mbit,none] [--methods allreduce,local:int4:72,local:lowrank:7]
        [--steps real,70ms] [--rounds 2]
    python -m bench.slow_links OUT.jsonl --table
    python -m bench.slow_links OUT.jsonl --first-step [--rates 10mbit] [--methods allreduce,local]

Each process sits in a network namespace of its own, whose link to the others is that fast in each direction (needs
root); "none" is as fast as it goes. All methods and rates take turns in each round, in an order that is turned around
from round to round, so that whatever else the machine does falls on all of them alike: ratios count. Steps are "real"
(ResNet-18 with 1000 classes, 8 pictures of 32 x 32 per process, on the processor) or virtual, such as "70ms": a sleep
of that length takes the place of forward and backward. How methods are written is said in bench/slow_methods.py.

Each turn adds a line to OUT.jsonl. The same command goes on where it was stopped. What would take longer than
--longest-s is noted as hopeless and not run.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.network.lab import Lab, why_not

from bench.slow_start import first_steps
from bench.slow_table import show

ROOT = Path(__file__).parent.parent
FEWEST, MOST = 2, 40
# For how many updates to make and which are hopeless, no more: bits that each machine sends per agreement.
PARAMETERS = 11_689_512
BITS = {"allreduce": 32, "bf16": 16, "int8": 8.1, "int4": 4.1, "none": 32, "powersgd": 0.5, "lowrank": 0.5, "alone": 0}
STEP_GUESS_S = 0.25


def main():
    given = arguments()
    if given.table:
        show(read(given.out))
        return
    if reason := why_not():
        sys.exit(f"bench.slow_links can't be done here: {reason}")
    # So that processes and namespaces go with this one when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with Lab(hosts=given.processes) as lab:
        try:
            if given.first_step:
                first_steps(lab, given)
            else:
                if left := turns_left(given):
                    with crew(lab, given.processes) as workers:
                        take_turns(lab, workers, left, given)
                show(read(given.out))
        finally:
            # Told to end while it takes the namespaces away, it would leave some of them.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def turns_left(given):
    """What each turn is about, but for those that OUT.jsonl has."""
    done = {key(record) for record in read(given.out)}
    places = [(steps, rate) for steps in given.steps.split(",") for rate in given.rates.split(",")]
    turns = [(steps, rate, method) for steps, rate in places for method in given.methods.split(",")]
    wanted = [
        {"steps": steps, "rate": rate, "method": method, "round": number, "processes": given.processes}
        for number in range(given.rounds)
        for steps, rate, method in (turns if number % 2 == 0 else reversed(turns))
    ]
    return [about for about in wanted if key(about) not in done]


def take_turns(lab, workers, turns, given):
    for about in turns:
        record = take_turn(lab, workers, about, given)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**about, **record}) + "\n")
        say(about, record)


def take_turn(lab, workers, about, given):
    """Prepares and ends with links as fast as they go, and measures on slow ones."""
    updates = planned(about, given)
    if not updates:
        return {"hopeless": True}
    limit(lab, None)
    (made, *_) = tell(workers, do="prepare", method=about["method"], steps=about["steps"])
    load = [os.getloadavg()[0]]
    limit(lab, None if about["rate"] == "none" else about["rate"])
    measured = tell(workers, do="measure", updates=updates)
    limit(lab, None)
    ended = tell(workers, do="finish")
    load.append(os.getloadavg()[0])
    mean = lambda name: sum(each[name] for each in measured) / len(measured)  # noqa: E731 - for this record alone
    return {
        **made,
        "updates": updates,
        "seconds": max(each["seconds"] for each in measured),
        "cpu_s": mean("cpu_s"),
        "agreeing_s": mean("agreeing_s"),
        **{name: mean(name) for name in measured[0] if name.startswith(("received", "sent"))},
        "payload_bytes": None if measured[0]["payload_bytes"] is None else mean("payload_bytes"),
        "finish_s": max(each["finish_s"] for each in ended),
        "equal": len({each["checksum"] for each in ended}) == 1,
        "load": load,
    }


def planned(about, given):
    """How many updates a turn makes; 0 where even the fewest would take too long."""
    name, *more = about["method"].split(":")
    codec, every = (more[0], int(more[1])) if name == "local" else (name, 1)
    bits = 0 if about["rate"] == "none" else BITS[codec] * PARAMETERS * 2 * (1 - 1 / given.processes)
    exchange_s = bits / bits_per_s(about["rate"])
    alone_s = STEP_GUESS_S if about["steps"] == "real" else float(about["steps"].removesuffix("ms")) / 1e3
    round_s = max(every * alone_s, exchange_s)
    if name == "local":
        rounds = max(math.ceil(given.exchanges / given.rounds), min(MOST // every, int(given.budget_s / round_s)))
    else:
        rounds = max(FEWEST, min(MOST, int(given.budget_s / round_s)))
    return every * rounds if rounds * round_s <= given.longest_s else 0


def bits_per_s(rate):
    return math.inf if rate == "none" else int(rate.removesuffix("mbit")) * 1e6


def limit(lab, rate):
    for host in lab.hosts:
        lab.rate(host, rate)


@contextlib.contextmanager
def crew(lab, size, module="bench.slow_worker"):
    """So many processes, equally many in each host, host by host; they end with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        init = f"tcp://{lab.address(1)}:{listener.getsockname()[1]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-m", module, "--size", str(size), "--init", init]
    workers = [
        lab.exec(lab.hosts[rank * len(lab.hosts) // size], [*command, "--rank", str(rank)], env=variables, cwd=ROOT,
                 text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(size)
    ]  # fmt: skip
    try:
        yield workers
        for worker in workers:
            worker.stdin.close()
        for worker in workers:
            worker.wait(60)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def tell(workers, **command):
    """Gives all processes a command, and what each answered."""
    for worker in workers:
        worker.stdin.write(json.dumps(command) + "\n")
        worker.stdin.flush()
    answers = [worker.stdout.readline() for worker in workers]
    if not all(answers):
        raise RuntimeError(f"a process ended while it was told {command}; its own last words are above")
    return [json.loads(answer) for answer in answers]


def say(about, record):
    told = "hopeless, not run"
    if "seconds" in record:
        told = f"{record['seconds'] / record['updates']:.3f} s/step over {record['updates']}"
        told += f", {record['received_bytes'] / record['updates'] / 1e3:.1f} kB/step received"
        told += f", replicas {'equal' if record['equal'] else 'differ'}, load {record['load'][1]:.1f}"
    words = f"{about['steps']} {about['rate']} {about['method']} round {about['round'] + 1}: {told}"
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def key(record):
    return tuple(record.get(name) for name in ("steps", "rate", "method", "round", "processes"))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", default="10mbit,none")
    parser.add_argument("--methods", default="alone,allreduce,local:int4:72,local:lowrank:7")
    parser.add_argument("--steps", default="real")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--exchanges", type=int, default=10, help="of local, over all rounds of a rate")
    parser.add_argument("--budget-s", type=float, default=30, help="for one turn of a method that agrees in each step")
    parser.add_argument("--longest-s", type=float, default=400, help="for one turn; what takes longer is hopeless")
    parser.add_argument("--first-step", action="store_true", help="how long `manyhands train` takes to its first step")
    parser.add_argument("--table", action="store_true", help="shows what OUT.jsonl has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
