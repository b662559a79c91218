"""Selection, capabilities and synchronization of the devices that torch computes on."""

import inspect
import os

import torch

from manyhands.core.errors import UserError
from manyhands.core.files import parse_count
from manyhands.core.machine import cpu_model

# Types of accelerators on which `make test-gpu` has passed; others get only torch's defaults, unless the environment
# variable names the type (docs/guides/gpu-results.md).
_PASSED = () if torch.version.hip else ("cuda",)  # ROCm's type is cuda too, and has not passed
TESTED_DEVICES = (*_PASSED, *os.environ.get("MANYHANDS_TESTED_DEVICES", "").split(","))


def accelerator() -> str:
    """Returns the type of this machine's accelerators, such as cuda or npu, or "cpu" if there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found else "cpu"


def is_accelerator(device: str | torch.device) -> bool:
    """Returns True for a device with streams, pinned memory and memory statistics: any device except CPU and MPS."""
    return torch.device(device).type not in {"cpu", "mps"}


def is_tested_accelerator(device: str | torch.device) -> bool:
    """Returns True if a device's type has passed our GPU tests. On other accelerators, torch's defaults are used."""
    return is_accelerator(device) and torch.device(device).type in TESTED_DEVICES


def device_name(device: str | torch.device) -> str:
    """Returns the product name of an accelerator or, for other devices, of this machine's CPU."""
    return torch.get_device_module(device).get_device_name(device) if is_accelerator(device) else cpu_model().name


def resolve_device_type(requested: str, processes: int) -> str:
    """Resolves "auto" to a type such as "cuda" ("cpu" if none is usable), "auto:1" to "cuda:1"; keeps other values."""
    if requested.partition(":")[0] != "auto":
        return requested
    found = accelerator()
    if ":" in requested:  # "auto:1" is kept without an accelerator, and refused later
        return requested if found == "cpu" else requested.replace("auto", found)
    return "cpu" if found == "mps" and processes > 1 else found  # torch has no collectives for mps


def require_device(kind: str, *hints: str) -> None:
    """Raises UserError if this machine lacks a device such as cuda or cuda:1. `hints` come before the usual one."""
    name, _, number = kind.partition(":")
    if name == "cpu":
        return
    if accelerator() != name:
        hints = (*hints, "remove --device, or set --device cpu")
        missing = "accelerator" if name == "auto" else f"{name} device"
        raise UserError(f"this machine has no {missing}", "cluster.device", hints)
    count = torch.accelerator.device_count()
    if number and ((typed := parse_count(number)) is None or typed >= count):
        what = f"there is no {kind}: this machine has {count} {name} device(s), counted from 0"
        raise UserError(what, "cluster.device", (f"choose {name}:0 … {name}:{count - 1}",))


def wait_for_device(device: str | torch.device) -> None:
    """Blocks until a device has finished its queued work. Does nothing for a CPU, which has no queue."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def has_native_bf16(device: str) -> bool:
    """Returns True if a device has bfloat16 instructions, False if bfloat16 would be emulated."""
    if torch.device(device).type == "cpu":
        return cpu_model().bf16
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    # CUDA and XPU have one parameter, including_emulation; Ascend has none.
    return bool(supported and supported(*(False for _ in inspect.signature(supported).parameters)))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error reports that a device or the machine is out of memory."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
