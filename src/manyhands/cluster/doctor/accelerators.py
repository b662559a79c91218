"""What torch says of this machine's accelerators, asked in a process of its own: as slow as torch's import."""

import json
import subprocess
import sys
from typing import Any

from manyhands.core.errors import RunError

_ASK = """
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


def ask_torch() -> dict[str, Any]:
    """What torch sees.

    count: accelerators that this user's processes see; built_for: "CUDA 13.0", empty for CPUs alone; version: torch's;
    said: its own warning, if it gave one. Raises RunError: torch can't be imported.
    """
    done = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, _, content = line.partition(" ")
        if name == "manyhands-accelerators":
            return json.loads(content)
    last = done.stderr.strip().rpartition("\n")[2]
    raise RunError(f"torch can't be imported: {last}", sys.executable, ("reinstall torch for this Python",))


def count_accelerators() -> int:
    """Accelerators that this user's processes see; 0 where there is none."""
    return int(ask_torch()["count"])
