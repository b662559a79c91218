"""What schedulers are handed: taken by the real tool or by a schema, and the very job that was meant."""

import json
import shlex
import stat
from pathlib import Path

import jsonschema
import pytest
import yaml

from manyhands.cli.flags import settings
from manyhands.cli.main import _options_by_path
from manyhands.config.load import load_job
from manyhands.core.errors import RunError, UserError
from manyhands.run.submit import submit

SCHEMAS = Path(__file__).parents[1] / "launchers" / "schemas"
IMAGE = {"submit.image": "example/train:1", "run.out": "/data/runs/first"}


def job_of(**flags):
    return load_job({key.replace("__", "."): value for key, value in flags.items()}, environment={}).job


def words_of(script):
    """The arguments of train in a batch script."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return shlex.split(line)[3:]


def job_from(words, file=None):
    """The job that a command line gives."""
    given, names = {}, []
    words = iter(_options_by_path(words))
    for word in words:
        if word == "--set":
            given.update(settings([next(words)]))
        elif word == "--out":
            given["run.out"] = next(words)
        else:
            names.append(word)
    if not file:
        given.update(zip(("data.name", "model.name"), names, strict=True))
    return load_job(given, file=file, environment={}).job


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"train.lr": 0.125, "train.norm_group": "global", "train.deterministic": True},
        {"data.name": "./my pets", "model.name": "file.py:Net", "model.arguments": {"width": 8, "word": 'a "b"'}},
        {"data.name": "cifar10", "model.name": "resnet18", "train.optimizer": "opt.py:make"},
        {"data.mean": [0.5], "submit.options": ["--partition=gpu"], "submit.nodes": 2, "cluster.backend": "gloo"},
    ],
)
def test_the_processes_get_the_very_job(flags):
    job = load_job({**flags, "run.out": "runs/x"}, environment={}).job
    again = job_from(words_of(submit(job, None, "slurm", dry_run=True)))
    assert again.model_dump(exclude={"submit"}) == job.model_dump(exclude={"submit"})
    manifest = yaml.safe_load(
        submit(job_of(**{**flags, **IMAGE, "submit.options": []}), None, "kubernetes", dry_run=True)
    )
    command = manifest["spec"]["trainer"]["command"]
    assert command[:2] == ["manyhands", "train"]
    again = job_from(command[2:])
    assert again.model_dump(exclude={"submit", "run"}) == job.model_dump(exclude={"submit", "run"})


def test_a_job_file_is_named_and_flags_beside_it_too(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[data]\nname = "mnist"\n[train]\nlr = 0.25\n')
    job = load_job({"train.epochs": 3}, file=file, environment={}).job
    words = words_of(submit(job, file, "slurm", dry_run=True))
    assert words[0] == str(file)
    assert words[1:3] == ["--set", "train.epochs=3"]
    assert "train.lr=0.25" not in words


def test_the_shape_is_asked_for():
    flags = {"submit.nodes": 2, "submit.accelerators": 4, "cluster.threads": 3, "submit.time_limit": "1:30:00"}
    text = submit(job_of(**flags), None, "slurm", dry_run=True)
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-task=1", "--cpus-per-task=3", "--time=1:30:00"):
        assert f"#SBATCH {line}\n" in text
    assert "gpus" not in submit(job_of(**{"cluster.processes": 2}), None, "slurm", dry_run=True)


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
@pytest.mark.parametrize(("nodes", "accelerators"), [(1, 8), (3, 0)])
def test_manifests_fit_their_schema(kind, nodes, accelerators):
    flags = {**IMAGE, "submit.kind": kind, "submit.nodes": nodes, "submit.accelerators": accelerators}
    content = yaml.safe_load(submit(job_of(**flags, **{"cluster.threads": 2}), None, "kubernetes", dry_run=True))
    schema = jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind}.json").read_text()))
    schema.validate(content)
    assert not schema.is_valid({**content, "spec": {**content["spec"], "nodes": 1}})
    if kind == "PyTorchJob":
        assert sum(part["replicas"] for part in content["spec"]["pytorchReplicaSpecs"].values()) == nodes
    else:
        assert content["spec"]["trainer"]["numNodes"] == nodes


@pytest.mark.parametrize(
    ("on", "flags", "said"),
    [
        ("kubernetes", {}, "container image"),
        ("kubernetes", {"submit.image": "a/b"}, "deletes the files of a container"),
        ("kubernetes", {**IMAGE, "submit.time_limit": "10"}, "is for Slurm"),
        ("slurm", {"submit.options": ["partition=gpu"]}, "must start with a dash"),
        ("slurm", {"submit.options": ["--a\n#SBATCH --b"]}, "must start with a dash"),
        ("slurm", {"cluster.device": "cpu", "submit.accelerators": 1}, "device is cpu"),
        ("slurm", {"cluster.processes": 2, "submit.accelerators": 1}, "2 processes, but 1 accelerators"),
        ("pbs", {}, "no scheduler"),
    ],
)
def test_what_cannot_be_is_refused(on, flags, said):
    with pytest.raises(UserError, match=said):
        submit(job_of(**flags), None, on, dry_run=True)


@pytest.mark.parametrize(("on", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_a_missing_or_refusing_program_is_named(on, program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"{program} is not on this machine"):
        submit(job_of(**IMAGE), None, on, dry_run=False)
    refusing = tmp_path / program
    refusing.write_text("#!/bin/sh\necho 'no such partition' >&2\nexit 3\n")
    refusing.chmod(refusing.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(RunError, match="no such partition"):
        submit(job_of(**IMAGE), None, on, dry_run=False)
