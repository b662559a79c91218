"""What splitting a network gains over data parallel, and where it gains nothing: measured on real processes.

    python -m bench.split [--case fc-1000,head] [--processes 2,4] [--link 100mbit] [--rounds 12] [--tail 30]

For each network the planner searches as the mode `auto` does, with measured op times and a measured link; the
finalists and data parallel then take turns, so that whatever else the machine does falls on all of them alike: the
ratios count, not the milliseconds. With --link each process sits in a network namespace of its own, whose link to the
others is that fast in each direction (needs root). With --tail so many strategies of the fully connected tail and the
loss have their turns as well, and the place of what the planner picks among them is told.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.network.lab import Lab, why_not

from bench.split_cases import ENTRIES
from manyhands.planner.choose import DATA_PARALLEL, pick_measured

ROOT = Path(__file__).parent.parent


def main():
    given = arguments()
    if given.link and (reason := why_not()):
        sys.exit(f"bench.split: --link {given.link} can't be done here: {reason}")
    # So that processes and namespaces go with this one when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = []
    for size in map(int, given.processes.split(",")):
        with place(size, given.link) as start:
            for name in given.case.split(","):
                before = os.getloadavg()[0]
                result = run(start, name, size, given)
                results.append({"case": name, "processes": size, "link": given.link, **(result or {"failed": True})})
                show(name, size, given, result, (before, os.getloadavg()[0]))
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any("failed" in result for result in results) else 0)


@contextlib.contextmanager
def place(size, link):
    """A function that starts a command as one rank, meeting the others at a port; what it needs goes with the block."""
    if not link:

        def start(rank, command, port, output):
            words = [*command, "--rank", str(rank), "--init", f"tcp://127.0.0.1:{port}"]
            return subprocess.Popen(words, env=environment("lo"), cwd=ROOT, stdout=output)

        yield start
        return
    with Lab(hosts=size, rate=link) as lab:

        def start_apart(rank, command, port, output):
            words = [*command, "--rank", str(rank), "--init", f"tcp://{lab.address(1)}:{port}"]
            return lab.exec(rank + 1, words, env=environment("eth0"), cwd=ROOT, stdout=output)

        try:
            yield start_apart
        finally:
            # Told to end while it takes the namespaces away, it would leave some of them.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def environment(interface):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run(start, name, size, given):
    """What rank 0 printed; None where the processes failed or took too long, which is said."""
    command = [sys.executable, "-m", "bench.split_worker", "--case", name, "--size", str(size)]
    command += ["--rounds", str(given.rounds), "--tail", str(given.tail if ENTRIES[name].tail else 0)]
    port = free_port()
    with tempfile.TemporaryFile("w+") as output:
        processes = [start(rank, command, port, output) for rank in range(size)]
        try:
            ended_well = wait(processes, given.longest_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if ended_well and lines else None


def wait(processes, longest_s):
    """Whether all end well; one that fails or time that runs out ends the waiting."""
    until = time.monotonic() + longest_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > until:
            break
        # Between two looks at the processes, which are waited for together.
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        print(f"failed or out of time: exit codes {codes}", flush=True)
    return not any(codes) and None not in codes


def show(name, size, given, result, load):
    where = f"{given.link} each, in namespaces" if given.link else "one machine"
    print(f"\n{name}: {ENTRIES[name].about}, batch {ENTRIES[name].batch}; {size} processes, {where}")
    print(f"load {load[0]:.1f} to {load[1]:.1f} on {os.cpu_count()} cores")
    if result is None:
        print("FAILED")
        return
    link = result["link"]
    print(f"measured link {link['mbit_per_s']:.0f} Mbit/s, {link['latency_ms']:.2f} ms; {given.rounds} rounds")
    print(f"{'plan':<17} {'predicted ms':>12} {'measured ms':>12} {'gain over data parallel':>24} {'sent MB':>9}")
    medians = {plan: statistics.median(values) * 1e3 for plan, values in result["seconds"].items()}
    for plan in sorted(medians, key=medians.get):
        gain, error = result["gains"].get(plan, (1.0, 0.0))
        told = result["rows"][plan]["predicted"]
        beside = f"{gain:.2f} ± {error:.2f}" if plan != DATA_PARALLEL else "1"
        print(f"{plan:<17} {told['step_ms']:>12.1f} {medians[plan]:>12.1f} {beside:>24} {told['sent_mb']:>9.1f}")
    print(result["reason"])
    if given.tail and ENTRIES[name].tail:
        print(place_of_pick(result))
    sys.stdout.flush()


def place_of_pick(result):
    """Where stands what `auto` takes: chosen among the finalists by half of the rounds, judged by the other half."""
    half = len(next(iter(result["seconds"].values()))) // 2
    pick = pick_measured({plan: result["seconds"][plan][:half] for plan in result["finalists"]}).name
    judged = pick_measured({plan: values[half:] for plan, values in result["seconds"].items()})
    gains = {plan: gain for plan, (gain, _) in judged.gains.items()} | {DATA_PARALLEL: 1.0}
    best = max(gains, key=gains.get)
    place = sorted(gains.values(), reverse=True).index(gains[pick]) + 1
    return (
        f"of {len(gains)} plans the pick, {pick}, is number {place}: {gains[pick]:.2f}x data parallel, "
        f"{gains[pick] / gains[best]:.2f} of the best, {best}, at {gains[best]:.2f}x"
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="fc-1000,fc-4096,head,resnet50", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--link", default="", help="in tc's words: 100mbit; empty: processes of one machine")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tail", type=int, default=0, help="strategies of the tail to try out")
    parser.add_argument("--longest-s", type=float, default=900, help="for one network on one number of processes")
    parser.add_argument("--out", type=Path, default=Path("build/split.json"))
    given = parser.parse_args()
    if unknown := set(given.case.split(",")) - set(ENTRIES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    return given


if __name__ == "__main__":
    main()
