"""Writes .safetensors files one tensor at a time, so that a file may hold more than fits in memory."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint.describe import BY_CODE, ElementType


def torch_type(kind: ElementType) -> torch.dtype:
    return getattr(torch, kind.name)


def element_type(dtype: torch.dtype) -> ElementType:
    """A type by its name; also one that no file can hold."""
    return ElementType(str(dtype).removeprefix("torch."), dtype.itemsize)


CODES = {torch_type(kind): code for code, kind in BY_CODE.items()}


@dataclass(frozen=True)
class Spec:
    """A tensor that a file will hold."""

    name: str  # its key in the file
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_stream(path: Path, specs: Sequence[Spec], fetch: Callable[[str], Tensor]) -> None:
    """Writes a file's header, then each tensor as it is fetched; as the safetensors library would have written it.

    The specs come in the order that readers are to see; each name is fetched once, in the file's order.

    Raises:
        OSError: the disk is full or failing.
        TypeError: the format has no such type.
    """
    laid = in_file_order(specs)
    with path.open("wb") as file:
        file.write(_header(laid, [spec.name for spec in specs]))
        for spec in laid:
            tensor = fetch(spec.name)
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise TypeError(f"{spec.name} is {tensor.dtype} {tuple(tensor.shape)}, expected {spec}")
            file.write(as_bytes(tensor).numpy().data)
            del tensor  # before the next one is put together


def in_file_order(specs: Sequence[Spec]) -> list[Spec]:
    """The specs as they lie in a file: large elements first, so that each tensor is aligned."""
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's values as bytes on the CPU [bytes]; the same memory where it is dense."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _header(laid: Sequence[Spec], order: list[str]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"order": json.dumps(order)}}
    position = 0
    for spec in laid:
        if spec.dtype not in CODES:
            raise TypeError(f"{spec.name} is {spec.dtype}, which a .safetensors file can't hold")
        offsets = [position, position + math.prod(spec.shape) * spec.dtype.itemsize]
        content[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
