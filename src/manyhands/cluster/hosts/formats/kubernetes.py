"""Kubernetes: manifests for Kubeflow, and torchrun's PET_* variables, which Kubeflow sets on each machine of a job."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml

from manyhands.cluster.hosts.inventory import JOB, Cluster, Machine, Submission, parse_bounded_number
from manyhands.core.errors import UserError

WHERE = "environment, PET_*"
_number = partial(parse_bounded_number, where=WHERE, hint="correct this value")


def manifest(job: Submission) -> str:
    """Returns the YAML text for kubectl. Pods find each other by the variables PET_* that Kubeflow sets."""
    wanted, command = job.wanted, [word.replace(JOB, job.name) for word in job.command]
    resources: dict[str, Any] = {}
    if wanted.accelerators:  # Kubernetes accepts accelerators only as a limit
        resources["limits"] = {"nvidia.com/gpu": wanted.accelerators}
    if job.threads:
        resources["requests"] = {"cpu": job.threads * job.processes}
    if wanted.kind == "TrainJob":
        version = "trainer.kubeflow.org/v1alpha1"
        trainer = {"image": wanted.image, "command": command, "numNodes": wanted.nodes, "numProcPerNode": job.processes}
        trainer |= {"resourcesPerNode": resources} if resources else {}
        spec: dict[str, Any] = {"runtimeRef": {"name": wanted.runtime}, "trainer": trainer}
    else:
        version = "kubeflow.org/v1"
        container = {"name": "pytorch", "image": wanted.image, "command": command}
        container |= {"resources": resources} if resources else {}
        replicas = {  # the first machine is the Master, the others are Workers
            role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
            for role, count in (("Master", 1), ("Worker", wanted.nodes - 1))
            if count
        }
        # A pod that was moved away resumes from its last checkpoint; a pod that keeps failing is not restarted forever.
        policy = {"cleanPodPolicy": "Running", "backoffLimit": 3}
        spec = {"nprocPerNode": str(job.processes), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    metadata = {"name": job.name} | ({"namespace": wanted.namespace} if wanted.namespace else {})
    content = {"apiVersion": version, "kind": wanted.kind, "metadata": metadata, "spec": spec}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def from_environment(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that PET_* describe, with this machine's index; None if PET_NNODES is not set.

    Only the first machine's address is known; other machines' names are empty. Raises UserError for an invalid value.
    """
    nodes = environment.get("PET_NNODES", "")
    if not nodes:
        return None
    least, colon, most = nodes.partition(":")
    if colon and least != most:
        message = f'PET_NNODES is "{nodes}"; a variable number of machines is not supported'
        raise UserError(message, WHERE, (f"set a fixed number of machines: PET_NNODES={most}",))
    count = _number("PET_NNODES", least, 1, 65536)
    slots = environment.get("PET_NPROC_PER_NODE") or "1"
    if slots == "cpu":
        hints = ("set the number of processes per machine; the cores are divided among them as threads",)
        raise UserError('PET_NPROC_PER_NODE is "cpu"; expected a number or "auto"', WHERE, hints)
    size = 0 if slots in {"auto", "gpu", "xpu"} else _number("PET_NPROC_PER_NODE", slots, 1, 1024)
    rank = environment.get("PET_NODE_RANK")
    machine = _number("PET_NODE_RANK", rank, 0, count - 1) if rank else None
    address, port = _master_address(environment)
    if count > 1 and not address:
        hints = ("set PET_MASTER_ADDR to the first machine's address",)
        raise UserError(f"PET_NNODES is {count}, but the address of the first machine is missing", WHERE, hints)
    machines = (Machine(address or "localhost", size), *[Machine("", size)] * (count - 1))
    return Cluster(machines, master_port=port, machine=machine, source="PET_* in the environment")


def _master_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns (address, port) of the first machine's store, from PET_MASTER_ADDR or the rendezvous endpoint."""
    backend = environment.get("PET_RDZV_BACKEND") or "static"
    if backend not in {"static", "c10d"}:
        message = f'PET_RDZV_BACKEND is "{backend}"; only static and c10d are supported'
        raise UserError(message, WHERE, ("set PET_MASTER_ADDR and PET_MASTER_PORT instead",))
    port = _number("PET_MASTER_PORT", environment.get("PET_MASTER_PORT") or "0", 0, 65535)
    endpoint, address = environment.get("PET_RDZV_ENDPOINT", ""), environment.get("PET_MASTER_ADDR", "")
    if address or not endpoint:
        return address, port
    matched = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?", endpoint)
    if matched is None:
        raise UserError(f'PET_RDZV_ENDPOINT is "{endpoint}"; expected host:port', WHERE, ("write n1:29400",))
    default = "29400" if backend == "c10d" else "0"
    port = _number("the port of PET_RDZV_ENDPOINT", matched[2] or matched[4] or default, 0, 65535)
    return matched[1] or matched[3], port
