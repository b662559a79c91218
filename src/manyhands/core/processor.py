"""Which kind of processor this machine has, and whether it multiplies bfloat16 itself."""

import functools
import platform
from pathlib import Path
from typing import NamedTuple

# What Linux calls it: on x86 the vector and the matrix instructions, on ARM the one extension.
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
_NAMES = ("model name", "CPU part", "cpu model")


class Processor(NamedTuple):
    """A kind of processor."""

    name: str
    bf16: bool  # it multiplies bfloat16 itself; False where the system doesn't tell


@functools.cache
def this_processor() -> Processor:
    """This machine's."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return processor_of(text)


def processor_of(cpuinfo: str) -> Processor:
    """What /proc/cpuinfo says of the first processor; other systems have none, and torch's word is all there is."""
    said = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    values = {key.strip(): value.strip() for key, _, value in said}
    name = next((values[key] for key in _NAMES if values.get(key)), platform.processor() or platform.machine())
    words = set(values.get("flags", values.get("Features", "")).split())
    # Some machines in the cloud call all their processors the same.
    own = sorted(words & (_BF16 | {"avx2", "avx512f"}))
    return Processor(" ".join([name, *own]), bool(words & _BF16))
