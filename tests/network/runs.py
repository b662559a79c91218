"""What tests of runs on the hosts of a lab share: jobs, flags, who still runs, and what a run should have learnt."""

import contextlib
import signal
import time
from pathlib import Path

import psutil
import torch

from manyhands.cluster.agents.early import AGENT
from tests.e2e import command
from tests.e2e.command import QUICKLY, done, events, final_weights, metrics, read, stop, wait_until
from tests.network.lab import SOURCE

SHORT = f"digits mlp --epochs 2 {QUICKLY}"
ENDLESS = f"digits mlp --epochs 100000 --set train.evaluate_every=1000 {QUICKLY}"
# In double precision, and without momentum, which lets rounding grow.
EXACT = "--set train.precision=fp64 --set train.momentum=0 --set train.nesterov=false"
# Long enough for a machine to come back in; it is ended by a stop once the machine has trained.
LONG = f"{ENDLESS} {EXACT}"
# After whatever happens nothing may be left on any machine for longer.
GONE_S = 30
# Where each host has a disk of its own, if a test gives it one (`own_disk`, fixture `apart`).
PLACE = Path("/srv/manyhands-apart")


def own_disk(lab, host, **others):
    """Starts a host's sshd anew with an empty disk of its own at the place."""
    PLACE.mkdir(parents=True, exist_ok=True)
    lab.start(host, prepare=f"mount -t tmpfs none {PLACE}", **others)


def hosts(lab, *slots, where=None):
    names = [f"{lab.name(host)}:{count}" for host, count in zip(lab.hosts, slots, strict=False)] or lab.names
    place = ["--cluster.workdir", where] if where else []
    return ["--hosts", ",".join(names), "--cluster.ssh", lab.ssh, *place]


def agents(lab, among=()):
    """Processes of ours in any host, or in these."""
    found = []
    for host in among or lab.hosts:
        for pid in lab.processes(host):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                words = " ".join(process.cmdline())
                if "manyhands" in words and "sshd" not in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(words)
    return found


def workers(lab, among=()):
    """(host, process) of all that train in any host, or in these."""
    found = []
    for host in among or lab.hosts:
        for pid in lab.processes(host):
            with contextlib.suppress(psutil.Error):
                if is_agent((process := psutil.Process(pid)).parent()):
                    found.append((host, process))
    return found


def is_agent(process):
    """A host's agent, started there or forked into it (tests.fork_server), not one of its workers."""
    return _has_agents_words(process) and not _has_agents_words(process.parent())


def _has_agents_words(process):
    with contextlib.suppress(psutil.Error):  # it has ended
        return AGENT[-1] in process.cmdline() and process.name() not in {"fork-server", "fork-client", "manyhands"}
    return False


def kill_agent(lab, host):
    """Kills a host's agent, with which its processes end."""
    (agent,) = [process for pid in lab.processes(host) if is_agent(process := psutil.Process(pid))]
    agent.kill()


def strike(lab, host, how):
    """What becomes of a host: its agent is killed, the machine dies ("kill"), or its cable is pulled ("down")."""
    kill_agent(lab, host) if how == "agent" else getattr(lab, how)(host)


def begun(folder="run", kind="metrics"):
    """True once the run has made updates (or saved)."""
    path = Path(folder) / "metrics.jsonl"
    return lambda: path.is_file() and '"kind":"step"' in path.read_text() if kind == "metrics" else events(folder, kind)


def machines(folder="run"):
    return [entry["host"] for entry in read(folder, "machines.json")]


def steps(folder="run"):
    return [record["step"] for record in metrics(folder)]


def trains_on(made, process=None):
    """Waits until a run has made more updates, given what says which it has made."""
    before = len(made())
    wait_until(lambda: len(made()) > before + 2, process)


def trained_on(count, process):
    """Waits until the run has made updates in a start with so many machines."""
    wait_until(lambda: events("run", "resumed") and len(machines()) == count, process)
    trains_on(steps, process)


def gone(lab):
    """Waits until no host has a process of ours; the limit is part of what is promised."""
    until = time.monotonic() + GONE_S
    while left := agents(lab):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def listening(lab, host):
    """Addresses and ports on which anything in a host listens, sshd left out."""
    rows = [line.split() for line in lab.run(host, ["ss", "-Htlnp"]).splitlines()]
    return {row[3] for row in rows if not row[3].endswith(":22")}


def undisturbed(*job, out="whole"):
    """The weights of a run here that nothing happens to."""
    done("train", *job, "--out", out)
    return final_weights(out)


def assert_same_updates(folder, theirs):
    for name, tensor in final_weights(folder).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12)


def stopped_as_undisturbed(process, folder="run"):
    """Stops an endless run, and compares it with one that nothing has happened to, up to the same update."""
    ended = stop(process, signal.SIGINT)
    last = events("run", "stopped")[-1]["step"]
    assert_same_updates(folder, undisturbed(LONG, f"--set train.max_steps={last}"))
    # Each update that counts was made once: a record's step is beyond the one before it.
    assert steps() == sorted(set(steps())), steps()
    return ended


def typed_on(lab, host, *words, **others):
    """A command of ours that is typed on a host, in a folder that it shares with the head unless another is named."""
    options = {**command.PIPES, "env": command.typed(PYTHONPATH=str(SOURCE)), **others}
    return lab.exec(host, [lab.python, "-m", "manyhands", *command.words(words)], **options)
