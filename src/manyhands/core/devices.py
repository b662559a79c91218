"""The devices that torch computes on: which one is meant, and when it has done its work."""

import torch

from manyhands.core.errors import UserError
from manyhands.core.outside import typed_number
from manyhands.core.processor import this_processor


def accelerator() -> str:
    """The kind of this machine's accelerators, such as "cuda"; "cpu" where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"


def device_kind(wanted: str, processes: int) -> str:
    """The device that a job's word means to each of so many processes; all but "auto" mean themselves.

    Only one process can use the GPU of an Apple computer: torch has no collectives for it.
    """
    if wanted != "auto":
        return wanted
    found = accelerator()
    return "cpu" if found == "mps" and processes > 1 else found


def require_device(kind: str, *hints: str) -> None:
    """Raises UserError where this machine lacks the device: "cuda", "cuda:1"; `hints` come before the usual one."""
    name, _, number = kind.partition(":")
    if name == "cpu":
        return
    if accelerator() != name:
        mend = (*hints, "remove --device, or set --device cpu")
        raise UserError(f"this machine has no {name} device", "cluster.device", mend)
    count = torch.accelerator.device_count()
    if number and ((typed := typed_number(number)) is None or typed >= count):
        what = f"there is no {kind}: this machine has {count} {name} device(s), counted from 0"
        raise UserError(what, "cluster.device", (f"choose {name}:0 … {name}:{count - 1}",))


def wait_for(device: str | torch.device) -> None:
    """Returns once a device has done all that it was given; a CPU always has."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def computes_bf16(device: str) -> bool:
    """True where a device multiplies bfloat16 itself, and doesn't make it of float32."""
    kind = torch.device(device).type
    if kind == "cpu":
        return this_processor().bf16
    if kind == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    return bool(supported and supported())
