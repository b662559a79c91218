"""Facts about this machine: plain JSON data, gathered in about a second, without torch and without changing anything.

A fact that can't be determined is missing, and its error is in "errors".
"""

import contextlib
import getpass
import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from ipaddress import ip_address
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import psutil

from manyhands.cluster.code_files import code_files
from manyhands.cluster.doctor.accelerators import HIDING, accelerators, cards, driver_versions, query_torch
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.hosts.inventory import INTERFACE_VARIABLES
from manyhands.core.errors import UserError
from manyhands.core.machine import cores, machine_id, memory_bytes
from manyhands.core.user_code import git_revision
from manyhands.data.known import find_named_choice, recognize_data_set
from manyhands.data.options import DataOptions, data_folder
from manyhands.parallel.group.ports import route_interface

VARIABLES = (  # variables that affect how processes connect and how many cores they use
    *INTERFACE_VARIABLES, "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NCCL_IB_DISABLE",
    *HIDING,
)  # fmt: skip
# Programs that train on several processes.
TRAINERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "horovodrun",
            "msrun", "mpirun")  # fmt: skip
# manyhands' own agent trains only while it has child processes; the doctor's agent has none.
AGENTS = ("manyhands.cluster.agents.agent", "manyhands.cluster.agents.elastic")
SHM = Path("/dev/shm")
PACKAGES = ("torch", "torchvision", "numpy", "torch-npu", "mindspore")
PACKAGE = Path(__file__).parents[2]
MOST_FILES, MOST_FOLDERS = 2000, 5000  # a folder with more is not the code of a job
DATA_S = 3.0


def gather_facts(wanted: FactsWanted) -> dict[str, Any]:
    """Gathers the requested facts. Returns {name: value}; "errors" has an error message for each missing fact."""
    workdir = Path(wanted.workdir or ".").expanduser()
    runs = workdir / Path(wanted.runs or "runs").expanduser()
    errors: dict[str, str] = {}
    facts: dict[str, Any] = {"time": time.time(), "system": platform.system(), "architecture": platform.machine()}
    collectors: dict[str, Callable[[], Any]] = {
        "name": host_and_addresses, "interfaces": interfaces, "firewall": firewall_rules,
        "default_interface": lambda: route_interface("192.0.2.1") or route_interface("2001:db8::1"),
        "python": lambda: {"version": platform.python_version(), "path": sys.executable},
        "versions": versions, "torchvision": torchvision_import_error,
        "compiler": lambda: any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))),
        "package": package_hash, "drivers": driver_versions, "accelerators": accelerators, "cards": cards,
        "torch_devices": lambda: query_torch() if wanted.torch and (facts.get("accelerators") or facts.get("cards"))
        else None,
        "cores": cores,
        "load": lambda: psutil.getloadavg()[0],  # processes running or ready, averaged over the last minute
        "memory": lambda: dict(zip(("total", "free"), memory_bytes(), strict=True)),
        "places": lambda: folder_facts({"work folder": workdir, "run folder": runs}),
        "jobs": other_jobs,
        "code": lambda: hash_code_files(workdir),
        "data": lambda: find_data_files(wanted.data, wanted.data_dir, workdir),
        "machine": machine_id, "user": getpass.getuser,
        "open_files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }  # fmt: skip
    for name in wanted.only or collectors:
        try:
            facts[name] = collectors[name]()
        except Exception as error:  # noqa: BLE001 - a missing fact must not hide the others; it is reported
            errors[name] = f"{type(error).__name__}: {error}"
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**facts, "environment": environment, "errors": errors}


def host_and_addresses() -> dict[str, Any]:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"host": name, "addresses": [], "error": str(error)}
    return {"host": name, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def interfaces() -> list[dict[str, Any]]:
    """Returns the network interfaces with addresses, state, speed (Mbit/s) and MTU."""
    states, longest = psutil.net_if_stats(), {socket.AF_INET: 32, socket.AF_INET6: 128}
    found: list[dict[str, Any]] = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [
            {"address": each.address.partition("%")[0],
             "prefix": int(ip_address(each.netmask)).bit_count() if each.netmask else longest[each.family]}
            for each in entries if each.family in longest
        ]  # fmt: skip
        up, _, speed, mtu, *_ = states.get(name, (False, 0, 0, 0))
        found.append({"name": name, "up": up, "speed_mbps": speed, "mtu": mtu, "addresses": addresses})
    return found


def firewall_rules() -> list[str]:
    """Returns firewall rules that drop or reject packets; an empty list if this user is not root."""
    if os.name != "posix" or os.geteuid() != 0:
        return []
    rules: list[str] = []
    commands = (["nft", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"])
    for command in (each for each in commands if shutil.which(each[0])):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3)
        for line in done.stdout.splitlines():
            words = set(line.lower().replace(";", " ").split())
            if words & {"drop", "reject"} or line.startswith((":INPUT DROP", ":OUTPUT DROP")):
                rules.append(line.strip())
    return rules[:200]


def folder_facts(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Returns path, existence, write permission, size and free bytes of each folder by name, and of /dev/shm."""
    found: dict[str, dict[str, Any]] = {}
    for name, path in [*([("shm", SHM)] if SHM.is_dir() else []), *folders.items()]:
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
    """Returns the processes that look like training jobs, without child processes of these jobs."""
    found: dict[int, dict[str, Any]] = {}
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "username"]):
        info, words = process.info, process.info["cmdline"] or []
        # Only programs count: `ssh n2 torchrun …` runs elsewhere, and an editor may have opened such a file.
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
    """Returns the versions of installed packages that should be the same on all machines."""
    found = {"manyhands": sys.modules["manyhands"].__version__, **{name: _version(name) for name in PACKAGES}}
    for cuda in (11, 12, 13, 14):  # the name of NCCL's package has its CUDA version
        found["nccl"] = _version(f"nvidia-nccl-cu{cuda}") or found.get("nccl", "")
    return {name: version for name, version in found.items() if version}


def torchvision_import_error() -> str:
    """Returns the import error of a torchvision that is built for another torch; "" if its import succeeds."""
    torch, torchvision = _version("torch") or "none", _version("torchvision")
    pins = (metadata.requires("torchvision") or ()) if torchvision else ()
    made_for = next((pin[1] for line in pins if (pin := re.match(r"torch *\(?==([^;,)+ ]+)", line))), "")
    fits = made_for in {"", torch.partition("+")[0]}
    # A different build of the right version (+cpu, +cu132 or no suffix) is imported too.
    if not torchvision or (fits and torch.partition("+")[2] == torchvision.partition("+")[2]):
        return ""
    command = [sys.executable, "-P", "-c", "import torchvision"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    error = tried.stderr.strip().rpartition("\n")[2]
    made = "is a different build" if fits else f"is for torch {made_for}"
    misfit = f"torchvision {torchvision} {made} and can't be imported with torch {torch}: {error}"
    return misfit if tried.returncode else ""


def package_hash() -> str:
    """Returns a hash of manyhands' source files, because two checkouts may have the same version."""
    return _hash_lines(f"{path.relative_to(PACKAGE).as_posix()} {_hash_file(path)}" for path in PACKAGE.rglob("*.py"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def hash_code_files(folder: Path) -> dict[str, Any]:
    """Returns hashes of the code files, and git's revision. "whole" is False if only some of the files are hashed."""
    if not folder.is_dir():
        return {"exists": False, "path": str(folder.absolute())}
    files, complete = dict[str, str](), False
    with contextlib.suppress(UserError):
        found = (path for path, skipped in code_files(folder, most_folders=MOST_FOLDERS) if not skipped)
        files = {path.relative_to(folder).as_posix(): _hash_file(path) for path in islice(found, MOST_FILES)}
        complete = next(found, None) is None
    common = _hash_lines(f"{name} {digest}" for name, digest in files.items())
    return {"exists": True, "path": str(folder.absolute()), "hash": common, "files": files, "whole": complete,
            "revision": git_revision(folder)}  # fmt: skip


def find_data_files(name: str, folder: str, workdir: Path) -> dict[str, Any]:
    """Finds a data set on this machine, and returns its path, kind, and a hash of the names and sizes of its files.

    "kind" is "folder" for a path, "named" for a known data set, or "none" for data without files. "whole" is False if
    listing the files took longer than DATA_S.
    """
    in_files = find_named_choice(name) in {"", "published", "torchvision"} and name != "digits"
    if not name or not in_files or ".py:" in name:
        return {"kind": "none"}
    path = workdir / Path(name).expanduser()
    if path.is_dir() or "/" in name or name.startswith("."):
        return {"kind": "folder", "path": str(path.absolute()), **_hash_tree([path] if path.is_dir() else [])}
    above = data_folder(DataOptions(dir=folder))
    word = _alphanumeric(name.partition(":")[2] or name)
    entries = sorted(above.iterdir()) if above.is_dir() else []
    roots = [entry for entry in entries if _alphanumeric(entry.name).startswith(word)]
    if not roots and above.is_dir() and recognize_data_set(above) == name:
        roots = [above]
    return {"kind": "named", "path": str(above / name), **_hash_tree(roots)}


def _alphanumeric(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _hash_tree(roots: list[Path]) -> dict[str, Any]:
    if not roots:
        return {"exists": False}
    until, lines, total, complete = time.monotonic() + DATA_S, list[str](), 0, True
    for root in roots:
        walked = os.walk(root, followlinks=True) if root.is_dir() else [(str(root.parent), [], [root.name])]
        for place, folders, names in walked:
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(place) / name
                if not name.startswith(".") and path.is_file():
                    size = path.stat().st_size
                    lines.append(f"{path.relative_to(root).as_posix() if path != root else name} {size}")
                    total += size
            if time.monotonic() > until:
                complete = False
                break
    return {"exists": True, "files": len(lines), "bytes": total, "hash": _hash_lines(lines), "whole": complete}


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _hash_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in sorted(lines):
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:16]
