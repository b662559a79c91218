"""What a fault costs, beside torchrun with a plain script: seconds to the next update, updates lost, what is left.

    python -m tests.faults.goals --rounds 3 --json FILE       all faults, both ways in turn; FILE gets a line each
    python -m tests.faults.goals --table FILE                 the table of what stands there

Three hosts in namespaces on this machine (needs root), one process each, 0.2 s an update. torchrun as its manual says
for machines that may go (`--nnodes 1:3 --max-restarts`), with the script goals_script.py, which saves every 20
updates and goes on from there. It is typed again on a machine that comes the moment that the machine is there.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import psutil

from manyhands.core.records import read_lines
from tests.e2e.command import QUICK, end, events, start, wait_until
from tests.faults import goals_script
from tests.faults.soak import last_step, workers
from tests.network.lab import Lab
from tests.network.runs import hosts, is_agent

# Who has not gone on by then never does, for this table.
NEVER_S = 120
FIRST_LINES = 5
# A machine, and what has happened to it, in whatever words.
WHO, WHAT = r"rank:? ?2\b|\bn3\b", r"SIGKILL|Signal 9|exitcode: ?-9|is lost|silent|agent"


class Manyhands:
    """A run on some of the hosts; the others join it by command."""

    agent = staticmethod(is_agent)
    workers = staticmethod(workers)

    def __init__(self, lab, folder, stack):
        self.lab, self.folder, self._stack = lab, folder / "run", stack
        self.log = folder / "head.log"

    def start(self, names):
        """Trains on these hosts."""
        net = f"{goals_script.__file__}:Net"
        options = ["--epochs", "100000", "--set", "run.log_every_s=0.1", "--set", "train.evaluate_every=1000", *QUICK]
        on = ["--hosts", ",".join(names), *hosts(self.lab)[2:], "--elastic", "1:3", "--out", self.folder]
        self.processes = [self._typed("launch", "digits", net, *options, *on)]

    def _typed(self, *words):
        log = self._stack.enter_context(self.log.open("a"))
        process = start(*words, to=log)
        self._stack.callback(end, process)
        return process

    def comes(self, _host):
        """Does nothing: a machine that was lost is asked in again."""

    def joins(self, host):
        """A machine that never took part."""
        self._typed("join", self.folder, "--host", self.lab.name(host))

    def said(self):
        """What each terminal shows, by the host that it is known to be of."""
        return [("", self.log.read_text())]


class Torchrun:
    """The same by torchrun, typed on each host."""

    def __init__(self, lab, folder, stack):
        self.lab, self.folder, self._stack = lab, folder, stack
        self.processes, self._logs = [], []

    @staticmethod
    def agent(process):
        """What torchrun itself is."""
        return "torch.distributed.run" in process.cmdline()

    @staticmethod
    def workers(lab):
        """As of manyhands: host and process of all that train."""
        found = []
        for host in lab.hosts:
            for pid in lab.processes(host):
                with suppress(psutil.Error):
                    words = psutil.Process(pid).cmdline()
                    if goals_script.__file__ in words and "torch.distributed.run" not in words and "-u" in words:
                        found.append((host, psutil.Process(pid)))
        return found

    def start(self, names):
        """On these hosts."""
        for host, name in zip(self.lab.hosts, self.lab.names, strict=True):
            if name in names:
                self.comes(host)

    def comes(self, host):
        """Types it on a host."""
        words = [self.lab.python, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", "1"]
        words += [
            "--max-restarts",
            "100",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "n1:29400",
            "--rdzv-id",
            "goals",
        ]
        self._logs.append(self.folder / f"{self.lab.name(host)}.log")
        log = self._stack.enter_context(self._logs[-1].open("a"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words += [goals_script.__file__, self.folder]
        self.processes.append(self.lab.exec(host, words, stdout=log, stderr=log, env=environment))

    joins = comes

    def said(self):
        """What each terminal shows, by the host that it is known to be of."""
        return [(path.stem, path.read_text()) for path in self._logs]


WAYS = {"manyhands": Manyhands, "torchrun": Torchrun}


def kill_worker(lab, way):
    """The process of n3."""
    (victim,) = [process for host, process in way.workers(lab) if host == 3]
    victim.send_signal(signal.SIGKILL)


def kill_agent(lab, way):
    """What watches the process of n3."""
    (agent,) = [pid for pid in lab.processes(3) if way.agent(psutil.Process(pid))]
    os.kill(agent, signal.SIGKILL)


def kill_all(lab, _way):
    """All that runs on n3, sshd too; its kernel closes the connections, as where a machine is shut down."""
    for pid in lab.processes(3):
        os.kill(pid, signal.SIGKILL)


FAULTS = {
    "process killed": kill_worker,
    "agent killed": kill_agent,
    "machine ended": kill_all,
    "power cut": lambda lab, _way: lab.kill(3),
    "power cut, first machine": lambda lab, _way: lab.kill(1),
    "link cut": lambda lab, _way: lab.down(3),
}
COMES = ("power cut, back", "machine added")


def trained(folder, since, processes=None):
    """The first update of a start after a moment, of so many processes: its record; None while there is none."""
    found = [
        line["time"]
        for line in events(folder, "started")
        if line["time"] > since and processes in (None, line["data"]["processes"])
    ]
    steps = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    return next((line for line in steps if found and line["time"] > found[0]), None)


def try_one(name, kind, scratch):
    """One fault, or one machine that comes, in a run of its own; what was seen."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts=3))
        way = WAYS[kind](lab, Path(scratch), stack)
        way.start(lab.names[:2] if name == "machine added" else lab.names)
        wait_until(lambda: trained(way.folder, 0) and last_step(way.folder) > goals_script.SAVE_EVERY + 5)
        found = {"what": name, "way": kind, "load": round(os.getloadavg()[0], 1)}
        if name in FAULTS:
            return {**found, **struck(lab, way, name)}
        if name == "machine added":
            way.joins(3)
        else:
            lab.kill(3)
            before = struck_at = time.time()
            while trained(way.folder, before, 2) is None and time.time() < struck_at + NEVER_S:
                time.sleep(0.05)
            lab.up(3)
            lab.start(3)
            way.comes(3)
        return {**found, **awaited(way, time.time(), processes=3)}


def struck(lab, way, name):
    """Does it, and waits for the next update, and until nothing is left of what was lost."""
    victims = [process for host, process in way.workers(lab) if host == (1 if name.endswith("first machine") else 3)]
    before = {host: len(said) for host, said in way.said()}
    since = time.time()
    FAULTS[name](lab, way)
    found = awaited(way, since, victims=victims)
    new = {host: said[before[host] :].splitlines()[:FIRST_LINES] for host, said in way.said()}
    told = ["\n".join(f"{host} {line}" for line in lines) for host, lines in new.items()]
    who = WHO.replace("2", "0").replace("3", "1") if name.endswith("first machine") else WHO
    return {**found, "named": any(re.search(who, text) and re.search(WHAT, text) for text in told), "told": told}


def awaited(way, since, processes=None, victims=()):
    """Waits for the next update, and until the victims are gone."""
    made, next_step, gone_at = last_step(way.folder), None, None
    while time.time() < since + NEVER_S and not (next_step and gone_at):
        gone_at = gone_at or (time.time() if not any(map(lives, victims)) else None)
        so_far = last_step(way.folder)
        next_step = next_step or trained(way.folder, since, processes)
        made = made if next_step else max(made, so_far)
        if next_step is None and all(process.poll() is not None for process in way.processes):
            break
        time.sleep(0.05)
    last = {} if next_step else {"last": [(host, text.splitlines()[-10:]) for host, text in way.said()]}
    asked = next((event["time"] for event in events(way.folder, "stopping") if event["time"] > since), None)
    return {
        **last,
        "asked_in_s": asked and round(asked - since, 1),
        "seconds": next_step and round(next_step["time"] - since, 1),
        "lost": next_step and max(0, made + 1 - next_step["step"]),
        "gone_s": gone_at and round(gone_at - since, 1),
        "ended_s": None if next_step else round(time.time() - since),
    }


def lives(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def told(values):
    """Median and spread; None is never."""
    if all(value is None for value in values):
        return "never"
    known = sorted(float("inf") if value is None else value for value in values)
    middle, least, most = statistics.median(known), known[0], known[-1]
    return f"{middle:.3g} ({least:g} to {most:g})".replace("inf", "never")


def table(lines):
    """For documents, of all that were measured."""
    rows = ["| what | way | rounds | next update after s | updates lost | gone after s | named in 5 lines |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, way in product([*FAULTS, *COMES], WAYS):
        found = [line for line in lines if (line["what"], line["way"]) == (name, way)]
        if found:
            named = f"{sum(line['named'] for line in found)} of {len(found)}" if "named" in found[0] else ""
            gone_s = told([line["gone_s"] for line in found]) if name in FAULTS else ""
            seconds, lost = told([line["seconds"] for line in found]), told([line["lost"] for line in found])
            lost = "all" if lost == "never" else lost
            rows.append(f"| {name} | {way} | {len(found)} | {seconds} | {lost} | {gone_s} | {named} |")
    return "\n".join(rows)


def main():
    """Measures what was asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=[*FAULTS, *COMES], help="may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.table.read_text().splitlines()] if given.table else []
    cases = product(given.only or [*FAULTS, *COMES], given.way or WAYS)
    for name, way in [] if given.table else list(cases) * given.rounds:
        with tempfile.TemporaryDirectory(prefix="manyhands-goals-") as scratch:
            lines.append(try_one(name, way, scratch))
        print(json.dumps(lines[-1]), flush=True)
        if given.json:
            with given.json.open("a") as kept:
                kept.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))


if __name__ == "__main__":
    sys.exit(main())
