"""Collectives of JSON data and tensors. They don't use pickle, because unpickling a peer's data could run code."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.files import parse_json
from manyhands.core.world import World


def broadcast_plain(value: Any, world: World) -> Any:
    """Returns rank 0's `value` (JSON data, which may contain infinities) on all processes. A collective."""
    if world.alone:
        return value
    content = _encode(value) if world.rank == 0 else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()], device=world.device)
    dist.broadcast(length, src=0)
    buffer = content.to(world.device) if world.rank == 0 else _zero_bytes(int(length), world)
    dist.broadcast(buffer, src=0)
    return _decode(buffer)


def broadcast_result(make: Callable[[], Any], world: World) -> Any:
    """Calls `make` on rank 0. All ranks return its result (JSON data) or raise its ManyhandsError. A collective."""
    found: dict[str, Any] = {}
    if world.is_main:
        try:
            found = {"value": make()}
        except ManyhandsError as error:
            usage = isinstance(error, UserError)
            found = {"error": [error.message, error.where, list(error.hints)], "usage": usage}
    found = broadcast_plain(found, world)
    if "error" in found:
        message, where, hints = found["error"]
        raise (UserError if found["usage"] else RunError)(message, where, tuple(hints))
    return found["value"]


def gather_plain(value: Any, world: World, group: Any = None) -> list[Any]:
    """Returns the values (JSON data) of all ranks of `group`, by default of the run, in order. A collective."""
    if world.alone:
        return [value]
    content, size = _encode(value), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([content.numel()], device=world.device), group=group)
    longest = max(int(length) for length in lengths)
    mine = _zero_bytes(longest, world)
    mine[: content.numel()] = content.to(world.device)
    everybody = [_zero_bytes(longest, world) for _ in range(size)]
    dist.all_gather(everybody, mine, group=group)
    return [_decode(buffer[: int(length)]) for buffer, length in zip(everybody, lengths, strict=True)]


def broadcast_tensors(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Returns rank 0's tensors by name, as CPU tensors, on all ranks. A collective."""
    if world.alone:
        return tensors
    mine = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    received: dict[str, Tensor] = {}
    for name, kind, shape in broadcast_plain(mine, world):
        room = torch.empty(shape, dtype=getattr(torch, kind), device=world.device)
        tensor = tensors[name].to(world.device).contiguous() if world.rank == 0 else room
        # Sent as bytes, because not every backend supports every dtype.
        dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.ndim else tensor[None].view(torch.uint8), src=0)
        received[name] = tensor.cpu()
    return received


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(buffer: Tensor) -> Any:
    return parse_json(bytes(buffer.cpu().numpy()), infinite=True)


def _zero_bytes(length: int, world: World) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8, device=world.device)
