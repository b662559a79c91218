"""Kubernetes: manifests for Kubeflow, its TrainJob and the older PyTorchJob."""

from typing import Any

import yaml

from manyhands.cluster.hosts.inventory import JOB, Submission

GPU = "nvidia.com/gpu"
# A pod that was moved away resumes from its last checkpoint; a pod that keeps failing is not restarted forever.
MOST_RESTARTS = 3


def manifest(job: Submission) -> str:
    """Returns the YAML text for kubectl; the pods find each other by the variables that Kubeflow sets (PET_…)."""
    command = [word.replace(JOB, job.name) for word in job.command]
    resources: dict[str, Any] = {}
    if job.accelerators:  # which a container takes as a limit
        resources["limits"] = {GPU: job.accelerators}
    if job.threads:
        resources["requests"] = {"cpu": job.threads * job.processes}
    if job.kind == "TrainJob":
        version = "trainer.kubeflow.org/v1alpha1"
        trainer = {"image": job.image, "command": command, "numNodes": job.nodes, "numProcPerNode": job.processes}
        trainer |= {"resourcesPerNode": resources} if resources else {}
        spec: dict[str, Any] = {"runtimeRef": {"name": job.runtime}, "trainer": trainer}
    else:
        version = "kubeflow.org/v1"
        container = {"name": "pytorch", "image": job.image, "command": command}
        container |= {"resources": resources} if resources else {}
        # The first machine is the Master, the others are Workers.
        replicas = {
            role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
            for role, count in (("Master", 1), ("Worker", job.nodes - 1))
            if count
        }
        policy = {"cleanPodPolicy": "Running", "backoffLimit": MOST_RESTARTS}
        spec = {"nprocPerNode": str(job.processes), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    metadata = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    content = {"apiVersion": version, "kind": job.kind, "metadata": metadata, "spec": spec}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
