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

from manyhands.cluster.accelerators import ask_torch
from manyhands.cluster.facts.devices import HIDING, accelerators, cards, driver_versions
from manyhands.cluster.facts.files import code, dataset
from manyhands.cluster.facts.load import cores, load, memory, other_jobs, places
from manyhands.cluster.facts.network import default_interface, firewall_rules, interfaces, own_name
from manyhands.cluster.facts.software import package_hash, versions
from manyhands.cluster.inventory import INTERFACE_VARIABLES

# What changes how programs meet, and on how many cores they run.
VARIABLES = (
    *INTERFACE_VARIABLES, "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NCCL_IB_DISABLE",
    *HIDING,
)  # fmt: skip


def gather(request: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about this machine.

    Args:
        request: "workdir" (empty for where this process is), "runs" (where run folders will lie), "data" (name) and
            "data_dir", "torch" (true: where there is an accelerator torch is asked too, which takes seconds), all
            optional; "only" names the facts that are wanted. An unknown key is ignored.
    """
    workdir = Path(request.get("workdir") or ".").expanduser()
    runs = workdir / Path(request.get("runs") or "runs").expanduser()
    errors: dict[str, str] = {}
    facts: dict[str, Any] = {"time": time.time(), "system": platform.system(), "architecture": platform.machine()}
    collectors: dict[str, Callable[[], Any]] = {
        "name": own_name,
        "interfaces": interfaces,
        "default_interface": default_interface,
        "firewall": firewall_rules,
        "python": lambda: {"version": platform.python_version(), "path": sys.executable},
        "versions": versions,
        "package": package_hash,
        "drivers": driver_versions,
        "accelerators": accelerators,
        "cards": cards,
        "torch_devices": lambda: ask_torch() if request.get("torch") and _any_card(facts) else None,
        "cores": cores,
        "load": load,
        "memory": memory,
        "places": lambda: places({"work folder": workdir, "run folder": runs}),
        "jobs": other_jobs,
        "code": lambda: code(workdir),
        "data": lambda: dataset(str(request.get("data") or ""), str(request.get("data_dir") or ""), workdir),
        "boot": _boot_id,
        "user": getpass.getuser,
        "open_files": _open_files,
    }
    for name in request.get("only") or collectors:
        collect = collectors[name]
        try:
            facts[name] = collect()
        except Exception as error:  # noqa: BLE001 - one fact that can't be found must not hide the others; it is told
            errors[name] = f"{type(error).__name__}: {error}"
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**facts, "environment": environment, "errors": errors}


def _any_card(facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("accelerators") or facts.get("cards"))


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _open_files() -> int:
    import resource  # no such thing on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
