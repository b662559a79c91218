"""Faults for a long time on three hosts of this machine (namespaces; needs root), and what is left of them.

    python -m tests.faults.soak kills --count 50 --epochs 400    random kills in one run: weights
    python -m tests.faults.soak faults --minutes 30              a fault a minute: memory, descriptors, ports, files
    python -m tests.faults.soak launches --count 100             launches that are ended at random moments: what is left

The last line is JSON; --json FILE keeps it. Ends with 1 where a promise doesn't hold.
"""

import functools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_SAVED
from tests.e2e.command import QUICKLY, events, final_weights, metrics, start, training, wait_until
from tests.faults.soak_saves import arguments, report
from tests.network.lab import Lab
from tests.network.runs import EXACT, begun, gone, hosts, listening, workers
from tests.network.runs import steps as steps_of

# By rounding in double precision, without momentum.
ROUNDING = 1e-6
# Of a link. After it TCP sends anew within 7 s, which no machine is given up for.
CUT_S = 4
# What a process's memory and descriptors may do by chance between the second quarter and the last.
FLAT, SOME = 1.1, 8
# Nobody reads the words of a command: a pipe would fill.
QUIETLY = {"by": start, "to": subprocess.DEVNULL}
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def job(data, epochs):
    """Of a run that is long enough for its faults."""
    seldom = f"--set train.evaluate_every={max(1, epochs // 20)} --set checkpoint.every=20s"
    return f"{data} mlp --epochs {epochs} {QUICKLY} {EXACT} {seldom}".split()


def difference(one, other):
    """The greatest between two runs' weights, relative to each tensor's greatest."""
    mine, others = final_weights(one), final_weights(other)
    return max(float((mine[name] - others[name]).abs().max() / others[name].abs().max()) for name in mine)


def evaluated_twice(folder):
    """Steps of evaluations that the records hold more than once."""
    steps = [line["step"] for line in metrics(folder, "evaluation")]
    return sorted({step for step in steps if steps.count(step) > 1})


def disturb(lab, process, draw, kinds):
    """Does one fault; says which."""
    kind = draw.choice(kinds)
    if kind == "cut":
        host = draw.choice(list(lab.hosts))
        lab.down(host)
        time.sleep(CUT_S)
        lab.up(host)
        return f"link of n{host} cut"
    host, victim = draw.choice(wait_until(lambda: workers(lab), process, patience=120))
    with suppress(psutil.Error):
        victim.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    return f"a process of n{host}: {kind}"


def kills(lab, folder, *, count, words, seed, kinds=("kill",)):
    """One run, disturbed so often, at random steps: at the end the weights of one that isn't, by the same updates."""
    draw, done = random.Random(seed), []
    with training("train", words, "--out", folder / "whole", **QUIETLY) as process:
        assert process.wait() == 0
    steps = events(folder / "whole", "finished")[-1]["step"]
    with training("launch", words, hosts(lab), "--out", folder / "run", **QUIETLY) as process:
        wait_until(begun(folder / "run"), process, patience=120)
        for moment in sorted(draw.uniform(0.05, 0.85) * steps for _ in range(count)):
            while process.poll() is None and max(steps_of(folder / "run"), default=0) < moment:
                time.sleep(0.1)
            if process.poll() is None:
                done.append(disturb(lab, process, draw, kinds))
        code = process.wait()
    gone(lab)
    found = {"faults": len(done), "code": code, "restarts": len(events(folder / "run", "restarted")), "steps": steps}
    if code:
        return {**found, "holds": False, "last": events(folder / "run")[-5:]}
    found |= {
        "difference": difference(folder / "run", folder / "whole"),
        "evaluated_twice": evaluated_twice(folder / "run"),
    }
    return {**found, "holds": found["difference"] <= ROUNDING and not found["evaluated_twice"] and len(done) == count}


def faults(lab, folder, *, minutes, every_s, words, seed):
    """One run that doesn't end, a fault every minute; what it holds is measured after each."""
    draw, held = random.Random(seed), []
    with training("launch", words, hosts(lab), "--out", folder / "run", **QUIETLY) as process:
        wait_until(begun(folder / "run"), process)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            disturb(lab, process, draw, ("kill", "stop", "cut"))
            time.sleep(every_s)
            wait_until(lambda: resolved(lab, folder / "run"), process, patience=120)
            held.append(holdings(lab, psutil.Process(process.pid)))
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    gone(lab)
    second, last = held[len(held) // 4 : len(held) // 2 + 1], held[-max(1, len(held) // 4) :]
    grown = {
        name: (statistics.median(one[name] for one in second), statistics.median(one[name] for one in last))
        for name in held[0]
    }
    flat = all(after <= before * FLAT + SOME for before, after in grown.values())
    restarts = len(events(folder / "run", "restarted"))
    found = {"faults": len(held), "restarts": restarts, "code": code, "held": grown}
    return {**found, "holds": flat and code == EXIT_SAVED}


def resolved(lab, folder):
    """Whether all train, and have for a moment since whatever happened last."""
    steps = [line["time"] for line in metrics(folder)]
    last = max(line["time"] for line in events(folder) if line["kind"] != "saved")
    return len(workers(lab)) == len(lab.hosts) and steps[-1] > max(last + 2, time.time() - 2)


def holdings(lab, head):
    """What the head and the processes of the hosts hold now."""
    processes = [head, *(psutil.Process(pid) for host in lab.hosts for pid in lab.processes(host))]
    found = {"megabytes": 0.0, "descriptors": 0, "threads": 0}
    for one in processes:
        with suppress(psutil.Error), one.oneshot():
            found["megabytes"] += one.memory_info().rss / 1e6
            found["descriptors"] += one.num_fds()
            found["threads"] += one.num_threads()
    found["ports"] = sum(len(listening(lab, host)) for host in lab.hosts)
    return {**found, "processes": len(processes), "files": len(leftovers(lab))}


def leftovers(lab):
    """Temporary files, and each host's shared memory."""
    shared = [Path(f"/proc/{pids[0]}/root/dev/shm") for host in lab.hosts if (pids := lab.processes(host))]
    return {
        path for place in (Path(tempfile.gettempdir()), *shared) for path in place.iterdir() if path.name != ".lock"
    }


def launches(lab, folder, *, count, words, seed, within_s=12.0, trained=0.0):
    """Started and ended at random moments: such a share of them once it trains, the others whatever they do by then."""
    draw, before, slowest_s = random.Random(seed), leftovers(lab), 0.0
    for number in range(count):
        said = folder / f"{number}.said"
        launched = ["launch", *words, *hosts(lab), "--out", folder / str(number)]
        with said.open("w") as into, training(launched, by=start, to=into) as process:
            if draw.random() < trained:
                wait_until(begun(folder / str(number)), process, patience=240)
            time.sleep(draw.uniform(0.1, within_s))
            process.send_signal(stop := draw.choice(STOPS))
            code = process.wait(120)
        begun_at_all = (folder / str(number)).exists()
        if code not in (-signal.SIGKILL, EXIT_SAVED, EXIT_INTERRUPTED) and (begun_at_all or code != -stop):
            raise AssertionError(f"launch {number} ended with {code} after {stop.name}: {said.read_text()}")
        began = time.monotonic()
        gone(lab)
        slowest_s = max(slowest_s, time.monotonic() - began)
    # ssh closes what it forwards a moment after the last of our processes.
    ports = staying(lambda: [line for host in lab.hosts for line in listening(lab, host)])
    new = staying(lambda: leftovers(lab) - before)
    files = {str(path): sorted(str(inner.relative_to(path)) for inner in path.rglob("*")) for path in new}
    return {
        "launches": count,
        "trained": sum(begun(folder / str(number))() for number in range(count)),
        "ports": ports,
        "files": files,
        "slowest_to_be_gone_s": slowest_s,
        "holds": not ports and not files,
    }


def staying(found, patience_s=60):
    """What is found, and found again until nobody would wait for it any longer."""
    until = time.monotonic() + patience_s
    while (left := found()) and time.monotonic() < until:
        time.sleep(0.2)
    return left


@contextmanager
def place():
    """Three hosts with shared memory of their own, and a folder; temporary files, also the head's, lie in it."""
    with tempfile.TemporaryDirectory(prefix="manyhands-soak-lab-") as made:
        folder = Path(made)
        (folder / "tmp").mkdir()
        usual, tempfile.tempdir = os.environ.get("TMPDIR"), str(folder / "tmp")
        os.environ["TMPDIR"] = tempfile.tempdir
        # Importing torch's compiler makes a cache for the user among the temporary files: it is no run's.
        own = {"TMPDIR": tempfile.tempdir, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        try:
            with Lab(hosts=3, environment=own) as lab:
                for host in lab.hosts:
                    lab.start(host, prepare="mount -t tmpfs tmpfs /dev/shm")
                yield lab, folder
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR") if usual is None else os.environ.update(TMPDIR=usual)


def main():
    """Does one of the three, and says so."""
    parser = arguments(__doc__, "kills", "faults", "launches", count=50)
    parser.add_argument("--within", type=float, default=12.0, help="of launches: seconds until the latest end")
    parser.add_argument("--training", type=float, default=0.5, help="of launches: the share that is let train first")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epochs", type=int, default=100)
    given = parser.parse_args()
    words = job(given.data, given.epochs if given.what == "kills" else 100_000)
    do = {
        "kills": functools.partial(kills, count=given.count),
        "faults": functools.partial(faults, minutes=given.minutes, every_s=60),
        "launches": functools.partial(launches, count=given.count, within_s=given.within, trained=given.training),
    }
    with place() as (lab, folder):
        return report(given, do[given.what](lab, folder, words=words, seed=given.seed))


if __name__ == "__main__":
    sys.exit(main())
