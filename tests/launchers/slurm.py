"""A Slurm of the tests' own on this machine: munge, slurmctld and slurmd, with their own key, sockets and ports."""

import os
import shutil
import signal
import socket
import subprocess
import time

import psutil

from tests.e2e.command import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
# Debian keeps the daemons where only root looks.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PATIENCE_S = 30
CONFIGURATION = """\
ClusterName=manyhands-tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES MaxTime=60 State=UP
"""


class NoSlurm(Exception):  # noqa: N818 - it says why, no more
    """Why there can be none here."""


class Slurm:
    """One controller and one node, this machine, which seems to have eight cores."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        missing = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
        if missing:
            raise NoSlurm(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
        if os.geteuid():
            raise NoSlurm("slurmd needs root")
        self._configure()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self):
        """For commands that talk to it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def _configure(self):
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        values = {"host": socket.gethostname().partition(".")[0], "folder": self.folder}
        values |= {"controller_port": free_port(), "node_port": free_port()}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def _start(self):
        files = [f"--{option}={self.folder}/munge.{option.partition('-')[0]}" for option in ("socket", "key-file")]
        files += [f"--{option}={self.folder}/munge.{option}" for option in ("log-file", "pid-file", "seed-file")]
        # --force: the folder is private, which munge warns of.
        self._daemon("munged", "--foreground", "--force", *files)
        _wait(lambda: (self.folder / "munge.socket").exists(), "munged doesn't listen")
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D")
        _wait(self._is_ready, f"its node doesn't get ready: {self._words()}")

    def _daemon(self, *command):
        with (self.folder / f"{command[0]}.out").open("wb") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        self.started.append(process)

    def _is_ready(self):
        for process in self.started:
            if process.poll() is not None:
                raise NoSlurm(f"{process.args[0]} ended with {process.returncode}: {self._words()}")
        return "idle" in self.run("sinfo", "-h", "-o", "%T").stdout

    def _words(self):
        """What the daemons said last."""
        logs = [path for path in (self.folder / "slurmd.log", self.folder / "slurmctld.log") if path.exists()]
        return " | ".join(line for path in logs for line in path.read_text().splitlines()[-3:])

    def run(self, *command, **others):
        """Runs a command of it to its end."""
        variables = {**os.environ, **self.environment, **others.pop("env", {})}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=240, check=False, **others
        )

    def stop(self):
        """Ends its jobs and daemons, and what they started."""
        if len(self.started) == 3 and all(process.poll() is None for process in self.started):
            self.run("scancel", "--user", "root")
            self.run("scancel", "--signal=KILL", "--user", "root")
        for process in reversed(self.started):
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in children:
                if child.is_running():
                    child.kill()
        for step in psutil.process_iter(["name", "environ"]):
            if step.info["name"] == "slurmstepd" and str(self.folder) in str(step.info["environ"]):
                step.kill()


def _wait(condition, otherwise):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise NoSlurm(otherwise)
        time.sleep(0.1)
