"""Submits a job to Slurm or Kubernetes: writes a script or manifest, and runs sbatch or kubectl."""

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
from manyhands.config.load import flatten, load_job
from manyhands.core.errors import RunError, UserError

# Options of the scheduler or of this machine, which the command of the processes omits.
NOT_HANDED_ON = ("submit.", "cluster.on", "cluster.processes", "cluster.hosts", "cluster.hostfile", "cluster.ssh")


def submit(job: Job, job_file: Path | None, scheduler: str, *, dry_run: bool) -> str:
    """Submits a job to `scheduler` ("slurm" or "kubernetes"), and returns the scheduler's output.

    With `dry_run`, only returns the script or manifest. Processes on Slurm also read the user's `job_file`. Raises
    UserError if an option is wrong or the program is missing, and RunError if the scheduler refuses the job.
    """
    if scheduler == "slurm":
        text, program = slurm.script(_slurm_submission(job, job_file)), ["sbatch"]
        hint = "run this command on the login machine of the cluster"
    elif scheduler == "kubernetes":
        text, program = kubernetes.manifest(_kubernetes_submission(job)), ["kubectl", "apply", "-f", "-"]
        hint = "install kubectl and select the cluster (kubectl config use-context …)"
    else:
        raise UserError(f'no scheduler is called "{scheduler}"', "--on", ("choose slurm or kubernetes",))
    if dry_run:
        return text
    if not shutil.which(program[0]):
        hints = (hint, "or print the job: --dry-run")
        raise UserError(f"{program[0]} is not on this machine", f"--on {scheduler}", hints)
    done = subprocess.run(program, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        hints = (*lines[:-1][:8], "to see the submitted job, use --dry-run")
        raise RunError(f"{program[0]} refused the job: {lines[-1]}", shlex.join(program), hints)
    return done.stdout.strip()


def _slurm_submission(job: Job, job_file: Path | None) -> Submission:
    """Returns the submission for Slurm. Its command names the run folder, so that a requeued job resumes."""
    out = job.run.out or f"runs/slurm-{JOB}"
    if job.submit.options and any("\n" in option or not option.startswith("-") for option in job.submit.options):
        hints = ('such as ["--partition=gpu"]',)
        raise UserError("an option of sbatch must start with a dash", "submit.options", hints)
    return _create_submission(job, ("manyhands", "train", *_train_arguments(job, job_file), "--out", out))


def _kubernetes_submission(job: Job) -> Submission:
    if not job.submit.image:
        hints = ("add --submit.image registry/name:tag",)
        raise UserError("Kubernetes needs a container image that contains manyhands", "submit.image", hints)
    for key in ("time_limit", "options"):
        if getattr(job.submit, key):
            raise UserError(f"submit.{key} is for Slurm", f"submit.{key}", (f"remove submit.{key}",))
    if not job.run.out:
        hints = ("add --out /data/runs/first, where /data is a volume that the runtime mounts",)
        raise UserError("Kubernetes deletes the files of a container, including the run folder", "--out", hints)
    return _create_submission(job, ("manyhands", "train", *_train_arguments(job, None), "--out", job.run.out))


def _create_submission(job: Job, command: tuple[str, ...]) -> Submission:
    wanted, cluster = job.submit, job.cluster
    accelerators = wanted.accelerators
    if cluster.device == "cpu" and accelerators:
        raise UserError("submit.accelerators is set, but the device is cpu", "--device", ("remove one of the two",))
    if cluster.device not in {"cpu", "auto"} and not accelerators:
        accelerators = cluster.processes or 1
    processes = cluster.processes or accelerators or 1
    if accelerators and processes != accelerators:
        what = f"each machine has {processes} processes, but {accelerators} accelerators"
        raise UserError(what, "-n and submit.accelerators", ("use one process per accelerator",))
    # A name that Kubernetes accepts too: small letters, digits and dashes; the time makes it unique.
    words = re.sub(r"[^a-z0-9]+", "-", f"{Path(job.data.name).stem}-{job.model.name}".lower()).strip("-")
    name = f"manyhands-{words}"[:40].strip("-") + f"-{datetime.now():%m%d-%H%M%S}"
    wanted = wanted.model_copy(update={"accelerators": accelerators})
    return Submission(name, command, wanted, processes, cluster.threads)


def _train_arguments(job: Job, job_file: Path | None) -> list[str]:
    """Returns the arguments of `manyhands train`: the job file or names, and --set for each option that differs."""
    names = {"data.name": job.data.name, "model.name": job.model.name}
    base = load_job({} if job_file else names, file=job_file, environment={}).job
    words = [str(job_file)] if job_file else list(names.values())
    there, here = (flatten(each.model_dump(mode="json")) for each in (base, job))
    omitted = {"run.out", *(() if job.train.built_in else KEYS_OF_BUILT_IN_OPTIMIZERS)}
    for key, value in here.items():
        if value != there[key] and key not in omitted and not key.startswith(NOT_HANDED_ON):
            words += ["--set", f"{key}={_as_toml(value)}"]
    return words


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_as_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
