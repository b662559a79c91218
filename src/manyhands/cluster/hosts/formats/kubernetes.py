"""Kubernetes: manifests for Kubeflow, its TrainJob and the older PyTorchJob."""

from typing import Any

import yaml

from manyhands.cluster.hosts.inventory import JOB, Submission

GPU = "nvidia.com/gpu"
# A pod that was moved away goes on from its last checkpoint; one that fails by itself must not do so for ever.
MOST_RESTARTS = 3


def manifest(job: Submission) -> str:
    """The YAML text for kubectl; the pods find each other by the variables that Kubeflow sets (PET_…)."""
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    kinds = {"TrainJob": ("trainer.kubeflow.org/v1alpha1", _train_job), "PyTorchJob": ("kubeflow.org/v1", _pytorch_job)}
    version, spec = kinds[job.kind]
    content = {"apiVersion": version, "kind": job.kind, "metadata": metadata, "spec": spec(job)}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _train_job(job: Submission) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": _command(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
    }
    resources = _resources(job)
    if resources:
        trainer["resourcesPerNode"] = resources
    return {"runtimeRef": {"name": job.runtime}, "trainer": trainer}


def _pytorch_job(job: Submission) -> dict[str, Any]:
    """The first machine is the Master, the others are Workers."""
    container: dict[str, Any] = {"name": "pytorch", "image": job.image, "command": _command(job)}
    resources = _resources(job)
    if resources:
        container["resources"] = resources
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "nprocPerNode": str(job.processes),
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": MOST_RESTARTS},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
            for role, count in replicas.items()
            if count
        },
    }


def _command(job: Submission) -> list[str]:
    return [word.replace(JOB, job.name) for word in job.command]


def _resources(job: Submission) -> dict[str, Any]:
    """A container takes accelerators as a limit; CPU cores are a request."""
    found: dict[str, Any] = {}
    if job.accelerators:
        found["limits"] = {GPU: job.accelerators}
    if job.threads:
        found["requests"] = {"cpu": job.threads * job.processes}
    return found
