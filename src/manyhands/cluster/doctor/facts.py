"""Facts about this machine: plain JSON data, gathered in about a second, without torch and without changing anything.

A fact that can't be determined is missing, and its error is in "errors".
"""

import contextlib
import getpass
import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from manyhands.cluster.doctor.accelerators import HIDING, accelerators, ask_torch, cards, driver_versions
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.doctor.fingerprints import code, dataset
from manyhands.cluster.hosts.inventory import INTERFACE_VARIABLES
from manyhands.core.machine import cores, memory, this_machine

# Variables that affect how processes connect and how many cores they use.
VARIABLES = (
    *INTERFACE_VARIABLES, "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NCCL_IB_DISABLE",
    *HIDING,
)  # fmt: skip
MOST_RULES = 200
# Programs that train on several processes.
TRAINERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "horovodrun",
            "msrun", "mpirun")  # fmt: skip
# manyhands' own agent trains only while it has child processes; the doctor's agent has none.
AGENTS = ("manyhands.cluster.agents.agent", "manyhands.cluster.agents.elastic")
SHM = Path("/dev/shm")
PACKAGES = ("torch", "torchvision", "numpy", "torch-npu", "mindspore")
PACKAGE = Path(__file__).parents[2]
# NCCL comes as a package of its own, named after the CUDA that it is for.
NCCL = tuple(f"nvidia-nccl-cu{version}" for version in (11, 12, 13, 14))


def gather(wanted: FactsWanted) -> dict[str, Any]:
    workdir = Path(wanted.workdir or ".").expanduser()
    runs = workdir / Path(wanted.runs or "runs").expanduser()
    errors: dict[str, str] = {}
    facts: dict[str, Any] = {"time": time.time(), "system": platform.system(), "architecture": platform.machine()}
    collectors: dict[str, Callable[[], Any]] = {
        "name": host_name,
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
        "torch_devices": lambda: (
            ask_torch() if wanted.torch and any(map(facts.get, ("accelerators", "cards"))) else None
        ),
        "cores": cores,
        "load": lambda: psutil.getloadavg()[0],  # processes running or ready, averaged over the last minute
        "memory": lambda: dict(zip(("total", "free"), memory(), strict=True)),
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
        except Exception as error:  # noqa: BLE001 - a missing fact must not hide the others; it is reported
            errors[name] = f"{type(error).__name__}: {error}"
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**facts, "environment": environment, "errors": errors}


def _open_files() -> int:
    import resource  # no such thing on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def host_name() -> dict[str, Any]:
    """The host's name and the addresses that it resolves to here."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"host": name, "addresses": [], "error": str(error)}
    return {"host": name, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def interfaces() -> list[dict[str, Any]]:
    """Every interface with its addresses, whether it is up, its speed and largest packet."""
    states, found = psutil.net_if_stats(), list[dict[str, Any]]()
    for name, entries in psutil.net_if_addrs().items():
        addresses: list[dict[str, Any]] = []
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                longest = 32 if entry.family == socket.AF_INET else 128
                bits = int(ip_address(entry.netmask)).bit_count() if entry.netmask else longest
                addresses.append({"address": entry.address.partition("%")[0], "prefix": bits})
        state = states.get(name)
        speed, mtu = (state.speed, state.mtu) if state else (0, 0)
        up = bool(state and state.isup)
        found.append({"name": name, "up": up, "speed_mbps": speed, "mtu": mtu, "addresses": addresses})
    return found


def default_interface() -> str:
    """The interface of the default route; empty where there is none."""
    routes = Path("/proc/net/route")
    rows = [line.split() for line in routes.read_text().splitlines()[1:]] if routes.exists() else []
    found = [(int(words[6]), words[0]) for words in rows if words[1] == words[7] == "00000000"]
    routes = Path("/proc/net/ipv6_route")
    rows = [line.split() for line in routes.read_text().splitlines()] if routes.exists() and not found else []
    found += [(int(words[5], 16), words[9]) for words in rows if words[0] == "0" * 32 and words[1] == "00"]
    if found := [each for each in found if each[1] != "lo"]:
        return min(found)[1]
    # Other systems have no such table.
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, but selects the route
            local = probe.getsockname()[0]
            for name, entries in psutil.net_if_addrs().items():
                if any(entry.address.partition("%")[0] == local for entry in entries):
                    return name
    return ""


def firewall_rules() -> list[str]:
    """Returns the rules that drop or reject packets, which only root can read."""
    if os.name != "posix" or os.geteuid() != 0:
        return []
    rules: list[str] = []
    for command in (["nft", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"]):
        if not shutil.which(command[0]):
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3)
        for line in done.stdout.splitlines():
            words = line.lower().replace(";", " ").split()
            if {"drop", "reject"} & set(words) or line.startswith((":INPUT DROP", ":OUTPUT DROP")):
                rules.append(line.strip())
    return rules[:MOST_RULES]


def places(named: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """For /dev/shm and each named folder: its size and free bytes, whether it is there and can be written to."""
    found: dict[str, dict[str, Any]] = {}
    for name, path in [*([("shm", SHM)] if SHM.is_dir() else []), *named.items()]:
        nearest = path.absolute()
        while not nearest.exists():
            nearest = nearest.parent
        usage = psutil.disk_usage(str(nearest))
        found[name] = {
            "path": str(path.absolute()), "exists": path.is_dir(), "size": usage.total, "free": usage.free,
            "writable": os.access(nearest, os.W_OK | os.X_OK),
        }  # fmt: skip
    return found


def other_jobs() -> list[dict[str, Any]]:
    """Returns processes that look like training jobs, without the processes that they started."""
    found: dict[int, dict[str, Any]] = {}
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "username"]):
        info, words = process.info, process.info["cmdline"] or []
        # `ssh n2 torchrun …` runs elsewhere, and an editor holds a file that only bears the name.
        programs = {Path(word).name for word in words[:2]} | {after for dash, after in pairwise(words) if dash == "-m"}
        trains = bool(programs & set(TRAINERS))
        if not trains and programs & set(AGENTS):
            with contextlib.suppress(psutil.Error):
                trains = bool(process.children())
        if trains and info["pid"] not in ours:
            found[info["pid"]] = {"pid": info["pid"], "user": info["username"] or "", "command": " ".join(words)[:160],
                                  "parent": info["ppid"]}  # fmt: skip
    return [job for job in found.values() if job["parent"] not in found]


def versions() -> dict[str, str]:
    """Returns the versions of packages that all machines should have in common; without those not installed."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    nccl = [version for name in NCCL if (version := _version(name))]
    return {"manyhands": sys.modules["manyhands"].__version__, **found, **({"nccl": nccl[-1]} if nccl else {})}


def torchvision_misfit() -> str:
    """Returns the import error of a torchvision for another torch; an empty string if it can be imported."""
    torch, torchvision = _version("torch") or "none", _version("torchvision")
    pins = (metadata.requires("torchvision") or ()) if torchvision else ()
    made_for = next((pin[1] for line in pins if (pin := re.match(r"torch *\(?==([^;,)+ ]+)", line))), "")
    fits = made_for in {"", torch.partition("+")[0]}
    # Another build is tried too: +cpu beside +cu132, or beside one without such a suffix.
    if not torchvision or (fits and torch.partition("+")[2] == torchvision.partition("+")[2]):
        return ""
    command = [sys.executable, "-P", "-c", "import torchvision"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    said = tried.stderr.strip().rpartition("\n")[2]
    made = "is a different build" if fits else f"is for torch {made_for}"
    misfit = f"torchvision {torchvision} {made} and can't be imported with torch {torch}: {said}"
    return misfit if tried.returncode else ""


def has_compiler() -> bool:
    """Returns True if there is a C++ compiler, which torch.compile needs."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))))


def package_hash() -> str:
    """Hashes manyhands' own source, because two checkouts may have the same version."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
