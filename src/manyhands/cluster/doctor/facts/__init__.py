"""What a machine says of itself: plain JSON data, found in a second or so, without torch and without changing anything.

A fact that can't be found out is missing; why stands in "errors".
"""

import getpass
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyhands.cluster.doctor.accelerators import ask_torch
from manyhands.cluster.doctor.facts.devices import HIDING, accelerators, cards, driver_versions
from manyhands.cluster.doctor.facts.files import code, dataset
from manyhands.cluster.doctor.facts.load import load, memory, other_jobs, places
from manyhands.cluster.doctor.facts.network import default_interface, firewall_rules, interfaces, own_name
from manyhands.cluster.doctor.facts.software import has_compiler, package_hash, torchvision_misfit, versions
from manyhands.cluster.doctor.questions import FactsWanted
from manyhands.cluster.hosts.inventory import INTERFACE_VARIABLES
from manyhands.core.machine import cores, this_machine

# What changes how programs meet, and on how many cores they run.
VARIABLES = (
    *INTERFACE_VARIABLES, "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NCCL_IB_DISABLE",
    *HIDING,
)  # fmt: skip


def gather(wanted: FactsWanted) -> dict[str, Any]:
    workdir = Path(wanted.workdir or ".").expanduser()
    runs = workdir / Path(wanted.runs or "runs").expanduser()
    errors: dict[str, str] = {}
    facts: dict[str, Any] = {"time": time.time(), "system": platform.system(), "architecture": platform.machine()}
    collectors: dict[str, Callable[[], Any]] = {
        "name": own_name,
        "interfaces": interfaces,
        "default_interface": default_interface,
        "firewall": firewall_rules,
        "python": lambda: {"version": platform.python_version(), "path": sys.executable},
        "versions": versions,
        "torchvision": torchvision_misfit,
        "compiler": has_compiler,
        "package": package_hash,
        "drivers": driver_versions,
        "accelerators": accelerators,
        "cards": cards,
        "torch_devices": lambda: ask_torch() if wanted.torch and _any_card(facts) else None,
        "cores": cores,
        "load": load,
        "memory": memory,
        "places": lambda: places({"work folder": workdir, "run folder": runs}),
        "jobs": other_jobs,
        "code": lambda: code(workdir),
        "data": lambda: dataset(wanted.data, wanted.data_dir, workdir),
        "machine": this_machine,
        "user": getpass.getuser,
        "open_files": _open_files,
    }
    for name in wanted.only or collectors:
        collect = collectors[name]
        try:
            facts[name] = collect()
        except Exception as error:  # noqa: BLE001 - one fact that can't be found must not hide the others; it is told
            errors[name] = f"{type(error).__name__}: {error}"
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**facts, "environment": environment, "errors": errors}


def _any_card(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("accelerators") or facts.get("cards"))


def _open_files() -> int:
    import resource  # no such thing on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
