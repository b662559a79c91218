"""Finds this machine's accelerators with vendors' tools and torch, and explains why torch can't use them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core.errors import RunError

PATIENCE_S = 8.0
DRIVER_FILES = {  # files with the version of a driver or toolkit, and the pattern of the version
    "nvidia": ("/proc/driver/nvidia/version", r"\b(\d+\.\d+(?:\.\d+)?)\b"),
    "ascend": ("/usr/local/Ascend/driver/version.info", r"(?m)^Version=(\S+)"),
    "cann": ("/usr/local/Ascend/ascend-toolkit/latest/version.cfg", r"\[([\d.]+\w*)"),
}
# PCI vendors, and the PCI classes of their accelerators (03xx: display, 12xx: processing accelerator).
CARDS = {"0x10de": ("NVIDIA", ("0x0300", "0x0302")), "0x1002": ("AMD", ("0x0380", "0x1200")),
         "0x19e5": ("Huawei", ("0x1200",))}  # fmt: skip
# Variables that hide devices from a process.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
DRIVERS = {
    "NVIDIA": "install the NVIDIA driver, then check that nvidia-smi lists the card",
    "AMD": "install the AMD driver (ROCm), then check that rocm-smi lists the card",
    "Huawei": "install the Ascend driver and firmware, then check that npu-smi info lists the card",
}
_TORCH_SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind and kind.type != "mps" else int(bool(kind))
built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
words = [str(each.message).splitlines()[0] for each in said]
found = {"count": count, "built_for": built, "version": torch.__version__, "said": words[-1] if words else ""}
print("manyhands-accelerators", json.dumps(found))
"""


def query_torch() -> dict[str, Any]:
    """Imports torch in a new process, and returns a dict of what torch reports. Raises RunError if the import fails.

    The keys are "version", "count" (of accelerators), "built_for" (such as CUDA 13.0; empty for CPU builds), and "said"
    (the last warning).
    """
    done = subprocess.run([sys.executable, "-P", "-c", _TORCH_SCRIPT], capture_output=True, text=True, check=False)
    if found := re.search("^manyhands-accelerators (.*)", done.stdout, re.MULTILINE):
        return json.loads(found[1])
    last = done.stderr.strip().rpartition("\n")[2]
    raise RunError(f"torch can't be imported: {last}", sys.executable, ("reinstall torch for this Python",))


def count_accelerators() -> int:
    return int(query_torch()["count"])


def driver_versions() -> dict[str, str]:
    """Returns the installed versions of the drivers "nvidia" and "ascend" and of the library "cann", by name."""
    found = {name: re.search(pattern, _read_text(Path(file))) for name, (file, pattern) in DRIVER_FILES.items()}
    return {name: match[1] for name, match in found.items() if match}


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def cards(bus: Path = Path("/sys/bus/pci/devices")) -> list[dict[str, str]]:
    """Returns vendor and PCI address of each accelerator card, even without a driver. `bus` is in sysfs."""
    found: list[dict[str, str]] = []
    for device in sorted(bus.iterdir()) if bus.is_dir() else []:
        vendor, classes = CARDS.get(_read_text(device / "vendor"), ("", ()))
        if vendor and _read_text(device / "class").startswith(classes):
            found.append({"vendor": vendor, "address": device.name})
    return found


def accelerators() -> list[dict[str, Any]]:
    """Returns kind, name, memory, load and processes of each accelerator. Raises RuntimeError if nvidia-smi fails."""
    found: dict[str, dict[str, Any]] = {}
    if shutil.which("nvidia-smi"):
        fields = "index,uuid,name,memory.total,memory.used,utilization.gpu"
        for index, uuid, name, *numbers in _query_nvidia_smi("gpu", fields):
            found[uuid] = _accelerator("cuda", int(index), name, *map(_parse_int, numbers))
        for uuid, pid, used, name in _query_nvidia_smi("compute-apps", "gpu_uuid,pid,used_memory,process_name"):
            if uuid in found:
                found[uuid]["processes"].append({"pid": _parse_int(pid), "used_mib": _parse_int(used), "name": name})
    # The output of npu-smi isn't made for programs.
    indices = sorted(int(path.name[7:]) for path in Path("/dev").glob("davinci[0-9]*") if path.name[7:].isdecimal())
    return [*found.values(), *(_accelerator("npu", index, "Ascend") for index in indices)]


def _accelerator(kind: str, index: int, name: str, memory: int = 0, used: int = 0, busy: int = 0) -> dict[str, Any]:
    return {"kind": kind, "index": index, "name": name, "memory_mib": memory, "used_mib": used, "busy_percent": busy,
            "processes": []}  # fmt: skip


def _query_nvidia_smi(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi failed: {(done.stderr or done.stdout).strip()}")
    rows = [line.split(", ", fields.count(",")) for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _parse_int(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0  # "[N/A]" for an unknown value


def explain_unused_accelerators(facts: Mapping[str, Any], host: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns (sentence, hints) that explain why torch sees no accelerator of a machine.

    Returns None if torch sees an accelerator, the machine has none, the user hid the devices, or facts are missing.
    """
    environment, seen = facts.get("environment", {}), facts.get("torch_devices")
    hidden = any(environment.get(name, "unset").strip() in {"", "-1", "NoDevFiles"} for name in HIDING)
    if hidden or seen is None or seen.get("count"):
        return None
    working, installed = facts.get("accelerators", ()), facts.get("cards", ())
    if not working and installed:
        vendors = sorted({card["vendor"] for card in installed})
        where = ", ".join(f"{card['vendor']} at PCI {card['address']}" for card in installed)
        what = f"{host} has {len(installed)} accelerator card(s) ({where}) without a working driver"
        return what, tuple(DRIVERS[vendor] for vendor in vendors)
    if not working:
        return None
    names = ", ".join(sorted({device["name"] for device in working}))
    what = f"{host} has {len(working)} accelerator(s) ({names}) that torch can't use"
    built, version = seen.get("built_for"), seen.get("version", "")
    if all(device["kind"] == "npu" for device in working):
        wanted = f"install torch-npu for torch {version.partition('+')[0]}: pip install torch-npu"
        hints = (wanted, "if torch-npu is installed, check that it works with your CANN: python -c 'import torch_npu'")
    elif not built:
        what += f": torch {version} is a CPU build"
        hints = ("install a torch build for these accelerators: https://pytorch.org/get-started/locally",)
    else:
        update = f"update the driver until nvidia-smi shows {built} or later"
        hints = (f"{update}, or install a torch build for an older version",
                 "in a container, pass the devices to the container (--gpus all)")  # fmt: skip
    if built and seen.get("said"):
        what += f" ({seen['said']})"
    return what, hints


def explain_unused_here() -> tuple[str, tuple[str, ...]] | None:
    """Calls `explain_unused_accelerators` for this machine. Imports torch only if there is an accelerator."""
    try:
        working = accelerators()
    except (OSError, RuntimeError) as error:
        hints = ("test the driver: nvidia-smi", "reload the driver")
        return f"the accelerators of this machine do not respond: {error}", hints
    installed = cards()
    facts = {"accelerators": working, "cards": installed, "environment": dict(os.environ)}
    facts["torch_devices"] = query_torch() if working or installed else None
    return explain_unused_accelerators(facts, "this machine")
