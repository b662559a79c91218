"""A head with more and more machines: seconds until all reach each other and run, and what the head takes meanwhile."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tests.network.lab import Lab

from bench.growth_processes import family, figures_of

SIZES = (1, 4, 16, 48)
LONGEST_S = 230
# An agent that starts workers has imported torch; here all machines' lie in one memory.
AGENT_BYTES = 450 << 20
# One kernel keeps the neighbours of all hosts in one table; on machines of their own each has a table.
NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
# The head of a launch up to where it would have torch imported everywhere.
HEAD = """
import json, sys, time
from pathlib import Path
from manyhands.cluster.agents.assemble import assembled
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.doctor.examine import examine
from manyhands.cluster.doctor.questions import FactsWanted
from manyhands.config.load import load_job
from manyhands.run.doctor import survey_crew
ssh, logs, *names = sys.argv[1:]
job = load_job({"cluster.ssh": ssh, "cluster.hosts": names}, environment={}).job
machines, began = [Machine(name) for name in names], time.monotonic()
with assembled(machines, job.cluster, Path(logs), FactsWanted()) as crew:
    crew.require_all()
    survey = survey_crew(job, crew, machines, measure=False)
    lost = [found.what for found in examine(survey) if found.check == "reach" and found.severity == "fail"]
    print(json.dumps([time.monotonic() - began, len(survey.reach), lost]), flush=True)
    sys.stdin.readline()
"""
# Says that it has started, and stays until it is stopped. It imports nothing: 2 cores carry many of it.
SCRIPT = """\
import os, time
open(f"{os.environ['STARTED']}/{os.environ['RANK']}", "w").close()
while True:
    time.sleep(1)
"""


def measure(hosts, scratch):
    folder = Path(tempfile.mkdtemp(prefix=f"hosts-{hosts}-", dir=scratch))
    (folder / "started").mkdir()
    (folder / "light.py").write_text(SCRIPT)
    environment = {"TMPDIR": str(folder), "STARTED": str(folder / "started")}
    try:
        with more_neighbours(), Lab(hosts=hosts, environment=environment) as lab:
            found = reached(lab, folder)
            if hosts * AGENT_BYTES < psutil.virtual_memory().available / 2:
                found |= started(lab, folder)
            return found
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def more_neighbours():
    before = NEIGHBOURS.read_text()
    NEIGHBOURS.write_text("8192")
    try:
        yield
    finally:
        NEIGHBOURS.write_text(before)


def reached(lab, folder):
    command = [sys.executable, "-c", HEAD, lab.ssh, str(folder), *lab.names]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        seconds, ways, lost = json.loads(head.stdout.readline())
        found = {"reached_s": seconds, "ways": ways, "processes": figures_of(family(head.pid))}
    finally:
        head.communicate("\n", timeout=LONGEST_S)
    if lost:
        raise RuntimeError("; ".join(lost[:3]))
    return found


def started(lab, folder):
    command = [sys.executable, "-m", "manyhands", "launch", "light.py", "--hosts", ",".join(lab.names)]
    command += ["--cluster.ssh", lab.ssh, "--out", str(folder / "run")]
    began = time.monotonic()
    with (folder / "head.log").open("w+") as log:
        head = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while len(list((folder / "started").iterdir())) < len(lab.names):
                if head.poll() is not None or time.monotonic() - began > LONGEST_S:
                    log.seek(0)
                    raise RuntimeError(log.read()[-3000:])
                time.sleep(0.1)
            seconds, (at_start,) = time.monotonic() - began, figures_of(family(head.pid)[:1])
            time.sleep(20)
            (later,) = figures_of(family(head.pid)[:1])
        finally:
            head.kill()
            head.wait()
    return {"started_s": seconds, "head": at_start, "idle_cpu_s": later["cpu_s"] - at_start["cpu_s"]}
