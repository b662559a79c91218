"""Hands a job to a scheduler: writes what it takes, and gives it to its own program."""

import json
import re
import shlex
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from manyhands.cluster.hosts.formats import kubernetes, slurm
from manyhands.cluster.hosts.inventory import JOB, Submission
from manyhands.config.job import KEYS_OF_BUILT_IN_OPTIMIZERS, Job
from manyhands.config.load import known_keys, load_job
from manyhands.core.errors import RunError, UserError

# The scheduler's own affair, or this machine's: never in the command that its processes run.
NOT_HANDED_ON = ("submit.", "cluster.on", "cluster.processes", "cluster.hosts", "cluster.hostfile", "cluster.ssh")


def submit(job: Job, job_file: Path | None, on: str, *, dry_run: bool) -> str:
    """Hands the job over.

    Args:
        job: what to do; `submit` says on how much.
        job_file: the file that the user named, if any; on Slurm the processes read it too.
        on: "slurm" or "kubernetes".
        dry_run: only write what would be handed over.

    Returns:
        The script or manifest, or what the scheduler said.

    Raises:
        UserError: something is missing for it, or the scheduler's program isn't here.
        RunError: the scheduler refused it.
    """
    if on == "slurm":
        text, program = slurm.script(_for_slurm(job, job_file)), ["sbatch"]
        hints = "run this command on the login machine of the cluster"
    elif on == "kubernetes":
        text, program = kubernetes.manifest(_for_kubernetes(job)), ["kubectl", "apply", "-f", "-"]
        hints = "install kubectl and select the cluster (kubectl config use-context …)"
    else:
        raise UserError(f'no scheduler is called "{on}"', "--on", ("choose slurm or kubernetes",))
    if dry_run:
        return text
    if not shutil.which(program[0]):
        raise UserError(f"{program[0]} is not on this machine", f"--on {on}", (hints, "or print the job: --dry-run"))
    done = subprocess.run(program, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise RunError(f"{program[0]} refused the job: {said.splitlines()[-1]}", shlex.join(program), _hints(said))
    return done.stdout.strip()


def _hints(said: str) -> tuple[str, ...]:
    """Everything the program said, where it is more than one line, and how to look at what it was given."""
    return (*said.splitlines()[:-1][:8], "to see the submitted job, use --dry-run")


def _for_slurm(job: Job, job_file: Path | None) -> Submission:
    """Each turn of a job writes into the same run folder, so that what was saved goes on."""
    out = job.run.out or f"runs/slurm-{JOB}"
    if job.submit.options and any("\n" in option or not option.startswith("-") for option in job.submit.options):
        raise UserError(
            "an option of sbatch must start with a dash", "submit.options", ('such as ["--partition=gpu"]',)
        )
    return _submission(job, ("manyhands", "train", *_words(job, job_file), "--out", out))


def _for_kubernetes(job: Job) -> Submission:
    if not job.submit.image:
        raise UserError(
            "Kubernetes needs a container image with manyhands in it",
            "submit.image",
            ("add --submit.image registry/name:tag",),
        )
    for key in ("time_limit", "options"):
        if getattr(job.submit, key):
            raise UserError(f"submit.{key} is for Slurm", f"submit.{key}", (f"remove submit.{key}",))
    if not job.run.out:
        hints = ("add --out /data/runs/first, where /data is a volume that the runtime mounts",)
        raise UserError("Kubernetes deletes the files of a container, and with them the run", "--out", hints)
    return _submission(job, ("manyhands", "train", *_words(job, None), "--out", job.run.out))


def _submission(job: Job, command: tuple[str, ...]) -> Submission:
    wanted, cluster = job.submit, job.cluster
    accelerators = wanted.accelerators
    if cluster.device == "cpu" and accelerators:
        raise UserError("submit.accelerators is set, but the device is cpu", "--device", ("remove one of the two",))
    if cluster.device not in {"cpu", "auto"} and not accelerators:
        accelerators = cluster.processes or 1
    processes = cluster.processes or accelerators or 1
    if accelerators and processes != accelerators:
        raise UserError(
            f"each machine has {processes} processes, but {accelerators} accelerators",
            "-n and submit.accelerators",
            ("use one process per accelerator",),
        )
    return Submission(
        name=_name(job),
        command=command,
        nodes=wanted.nodes,
        processes=processes,
        accelerators=accelerators,
        threads=cluster.threads,
        time_limit=wanted.time_limit,
        options=wanted.options,
        image=wanted.image,
        kind=wanted.kind,
        runtime=wanted.runtime,
        namespace=wanted.namespace,
    )


def _name(job: Job) -> str:
    """A name that Kubernetes takes too: small letters, digits and dashes; the time keeps two jobs apart."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{Path(job.data.name).stem}-{job.model.name}".lower()).strip("-")
    return f"manyhands-{words}"[:40].strip("-") + f"-{datetime.now():%m%d-%H%M%S}"


def _words(job: Job, job_file: Path | None) -> list[str]:
    """What `train` is to be told so that it has this very job: the file or names, and what differs from it."""
    if job_file:
        base, words = load_job({}, file=job_file, environment={}).job, [str(job_file)]
    else:
        base = load_job({"data.name": job.data.name, "model.name": job.model.name}, environment={}).job
        words = [job.data.name, job.model.name]
    there, here = base.model_dump(mode="json"), job.model_dump(mode="json")
    lost = () if job.train.built_in else KEYS_OF_BUILT_IN_OPTIMIZERS
    for key in known_keys():
        section, _, name = key.partition(".")
        if key in lost:
            continue
        if here[section][name] != there[section][name] and key != "run.out" and not key.startswith(NOT_HANDED_ON):
            words += ["--set", f"{key}={_as_toml(here[section][name])}"]
    return words


def _as_toml(value: Any) -> str:
    """One value on one line; lists and tables inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_as_toml(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False)
