"""How many accelerators this machine has, asked of torch in a process of its own."""

import subprocess
import sys

_COUNT = (
    "import torch\n"
    "kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None\n"
    "print('accelerators', torch.accelerator.device_count() if kind and kind.type != 'mps' else int(bool(kind)))"
)


def count_accelerators() -> int:
    """Accelerators that this user's processes see; 0 where there is none. Takes as long as torch's import."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    return next((int(words[1]) for words in lines if words[:1] == ["accelerators"]), 0)
