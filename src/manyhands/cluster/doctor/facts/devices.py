"""Accelerators and their drivers, as the vendors' own tools tell them; torch is not asked, it takes seconds."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

PATIENCE_S = 8.0
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")
PCI_DEVICES = Path("/sys/bus/pci/devices")
# Of each vendor the classes on the PCI bus of the cards that compute (03xx: display, 12xx: processing accelerator).
CARDS = {"0x10de": ("NVIDIA", ("0x0300", "0x0302")), "0x1002": ("AMD", ("0x0380", "0x1200")),
         "0x19e5": ("Huawei", ("0x1200",))}  # fmt: skip
# What hides devices from a process.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
ASCEND_TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit/latest/version.cfg")


def driver_versions() -> dict[str, str]:
    """Of NVIDIA's driver, Ascend's driver and CANN, where they are there."""
    patterns = {
        "nvidia": (NVIDIA_DRIVER, r"\b(\d+\.\d+(?:\.\d+)?)\b"),
        "ascend": (ASCEND_DRIVER, r"(?m)^Version=(\S+)"),
        "cann": (ASCEND_TOOLKIT, r"\[([\d.]+\w*)"),
    }
    found: dict[str, str] = {}
    for name, (path, pattern) in patterns.items():
        match = re.search(pattern, path.read_text(errors="replace")) if path.is_file() else None
        if match:
            found[name] = match[1]
    return found


def accelerators() -> list[dict[str, Any]]:
    """Each accelerator with its name, memory and processes. Raises RuntimeError: the vendor's tool fails."""
    return [*_nvidia(), *_ascend()]


def cards(bus: Path = PCI_DEVICES) -> list[dict[str, str]]:
    """Accelerator cards that are plugged in, whether or not a driver works: "vendor" and "address" on the PCI bus."""
    found: list[dict[str, str]] = []
    for device in sorted(bus.iterdir()) if bus.is_dir() else []:
        vendor, classes = CARDS.get(_word(device / "vendor"), ("", ()))
        if vendor and _word(device / "class").startswith(classes):
            found.append({"vendor": vendor, "address": device.name})
    return found


def _word(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _nvidia() -> list[dict[str, Any]]:
    if not shutil.which("nvidia-smi"):
        return []
    lines = _ask_nvidia("gpu", "index,uuid,name,memory.total,memory.used,utilization.gpu")
    found = {
        uuid: {
            "kind": "cuda", "index": int(index), "name": name, "memory_mib": _number(total), "used_mib": _number(used),
            "busy_percent": _number(busy), "processes": [],
        }
        for index, uuid, name, total, used, busy in lines
    }  # fmt: skip
    for uuid, pid, used, name in _ask_nvidia("compute-apps", "gpu_uuid,pid,used_memory,process_name"):
        if uuid in found:
            found[uuid]["processes"].append({"pid": _number(pid), "used_mib": _number(used), "name": name})
    return list(found.values())


def _ask_nvidia(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi failed: {(done.stderr or done.stdout).strip()}")
    rows = [line.split(", ", fields.count(",")) for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0  # "[N/A]" where the device doesn't tell


def _ascend() -> list[dict[str, Any]]:
    """By their device files alone: what is on them is only told by a tool whose output isn't made for programs."""
    indices = sorted(int(path.name[7:]) for path in Path("/dev").glob("davinci[0-9]*") if path.name[7:].isdecimal())
    return [
        {"kind": "npu", "index": index, "name": "Ascend", "memory_mib": 0, "used_mib": 0, "busy_percent": 0,
         "processes": []}
        for index in indices
    ]  # fmt: skip
