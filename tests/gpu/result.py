"""The one file that a run of `make test-gpu` or `make bench-gpu` leaves: for anybody to send back.

It names no machine, person or path. It is written anew after each part, so that whatever ends the run loses nothing.
Imports nothing but the standard library.
"""

import getpass
import hashlib
import json
import os
import platform
import re
import socket
import time
from pathlib import Path

# Where torch is asked, a process of its own does it: this one must start without.
ASK_TORCH = """
import json, torch, torchvision
found = {"torch": torch.__version__, "torchvision": torchvision.__version__, "cuda": torch.version.cuda, "cards": []}
if accelerator := torch.accelerator.current_accelerator(check_available=True):
    module, found["accelerator"] = torch.get_device_module(accelerator), accelerator.type
    for number in range(module.device_count()):
        card = module.get_device_properties(number)
        capability = [getattr(card, "major", None), getattr(card, "minor", None)]
        found["cards"].append({"name": card.name, "memory_mib": card.total_memory >> 20, "capability": capability})
    if accelerator.type == "cuda":
        found["cudnn"], found["nccl"] = torch.backends.cudnn.version(), list(torch.cuda.nccl.version())
print(json.dumps(found))
"""


def nameless(text: str, most: int = 6000) -> str:
    """A text's end without what tells whose machine it is from: paths but for their last word, hosts, users, addresses.

    A line of torch's source may stay: everybody has it.
    """
    text = re.sub(r"(?:/[\w.@+~-]+)+/([\w.@+-]+)", r"…/\1", text)
    for name, word in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(name) > 1:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    text = re.sub(r"\b(?:\d{1,3}\.){3}\d{1,3}\b", "ADDRESS", text)
    text = re.sub(r"\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b", "ADDRESS", text)
    return text if len(text) <= most else f"… {text[-most:]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        return ""


class ResultFile:
    """What is known so far."""

    def __init__(self, path: Path, kind: str, device: str, machine: dict) -> None:
        self._path, self._began = path, time.monotonic()
        self.result = {
            "format": 1,
            "kind": kind,
            "source": _source(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            **machine,
            "device": device,
            "seconds": 0.0,
            "complete": False,
            "parts": [],
        }

    def add(self, name: str, status: str, seconds: float, **more) -> None:
        """One part's outcome (proven, failed, timed out, skipped, unproven, not run), and what was said or measured."""
        reported = {key: nameless(value) if isinstance(value, str) else value for key, value in more.items() if value}
        self.result["parts"].append({"name": name, "status": status, "seconds": round(seconds, 1), **reported})
        self.write()

    def write(self, *, complete: bool = False) -> None:
        """All or nothing."""
        self.result["seconds"], self.result["complete"] = round(time.monotonic() - self._began, 1), complete
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(self._path)


def _source() -> str:
    """Which source was run, also where git is not: a digest of the program's and of these parts'."""
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for folder in (root / "src", root / "tests" / "gpu"):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]
