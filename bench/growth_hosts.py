"""A head with more and more machines: seconds to the start of a light script, and what the head takes meanwhile."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.network.lab import Lab

from bench.growth_processes import family, figures_of

SIZES = (1, 4, 16, 48)
LONGEST_S = 500
# Says that it has started, and stays until it is stopped. It imports nothing: 2 cores carry 48 of it.
SCRIPT = """\
import os, time
open(f"{os.environ['STARTED']}/{os.environ['RANK']}", "w").close()
while True:
    time.sleep(1)
"""


def measure(hosts, scratch):
    folder = Path(tempfile.mkdtemp(prefix=f"hosts-{hosts}-", dir=scratch))
    started = folder / "started"
    started.mkdir()
    (folder / "light.py").write_text(SCRIPT)
    with Lab(hosts=hosts, environment={"TMPDIR": str(folder), "STARTED": str(started)}) as lab:
        command = [sys.executable, "-m", "manyhands", "launch", "light.py", "--hosts", ",".join(lab.names)]
        command += ["--cluster.ssh", lab.ssh, "--out", str(folder / "run")]
        began = time.monotonic()
        with (folder / "head.log").open("w+") as log:
            head = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                while len(list(started.iterdir())) < hosts:
                    if head.poll() is not None or time.monotonic() - began > LONGEST_S:
                        log.seek(0)
                        raise RuntimeError(log.read()[-3000:])
                    time.sleep(0.1)
                seconds = time.monotonic() - began
                at_start = figures_of(family(head.pid))
                time.sleep(20)
                later = figures_of(family(head.pid)[:1])
            finally:
                head.kill()
                head.wait()
    shutil.rmtree(folder)
    return {"seconds": seconds, "processes": at_start, "idle_cpu_s": later[0]["cpu_s"] - at_start[0]["cpu_s"]}
