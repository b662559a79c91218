"""Applies parallel modes, and compares the replicas of a network."""

import functools
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core import choices, needs
from manyhands.core.errors import RunError, UserError
from manyhands.core.world import World
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.options import MODE_ALONE, MODES, USUAL_MODE, check_mode

# Values that are converted to int64 at a time: few enough for a CPU's cache; more on an accelerator, for fewer kernels.
CHECKED_AT_ONCE, CHECKED_ON_CARD = 1 << 15, 1 << 20
_ODD = 0x9E3779B1


def resolve_mode(mode: str, world: World) -> str:
    """Returns `mode`, or "single" if one process doesn't need the mode. Raises UserError if it can't run on several."""
    check_mode(mode)
    only = one_process_label(mode)
    if only and not world.alone:
        hints = (f"use --parallel {USUAL_MODE} for several processes", "or start one process: -n 1")
        raise UserError(f"mode {mode} runs as {only}, but {world.size} processes are running", "parallel.mode", hints)
    return MODE_ALONE if world.alone and getattr(choices.load_choice(MODES, mode), "NOTHING_ALONE", False) else mode


def normalizes_in_groups(mode: str) -> bool:
    """Returns True if BatchNorm's groups of samples are the same on any number of processes in this mode."""
    return bool(choices.load_choice(MODES, mode).NORM_GROUPS)


def met_sync_needs(mode: str) -> frozenset[needs.Need]:
    """Returns those requirements (`NEEDS`) of gradient synchronization methods that the parallel mode meets."""
    return choices.load_choice(MODES, mode).OFFERS


def one_process_label(mode: str) -> str:
    """Returns a description such as "one process for all devices" for a single-process mode, "" for other modes."""
    return getattr(choices.load_choice(MODES, mode), "ONE_PROCESS", "")


def takes_mesh(mode: str) -> bool:
    """Returns True if the mode requires a network that takes the mesh in its constructor and shards itself."""
    return bool(getattr(choices.load_choice(MODES, mode), "TAKES_MESH", False))


def follows_plan(mode: str) -> bool:
    return bool(getattr(choices.load_choice(MODES, mode), "FOLLOWS_PLAN", False))


def apply_mode(mode: str, model: nn.Module, world: World, request: ModeRequest) -> ParallelNetwork:
    network: ParallelNetwork = choices.load_choice(MODES, mode).apply(model, world, request)
    endless = {name for name, one in model.named_buffers() if not bool(torch.isfinite(one).all())}
    network.traits.nonfinite_buffers = frozenset(endless)
    return network


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns two checksums of each tensor's bits, a plain and a position-weighted sum: int64 [len(tensors), 2]."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = torch.zeros(len(tensors), 2, dtype=torch.int64)
    for row, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view(widths[flat.element_size()] if not flat.is_complex() else torch.int64)
        weights = _position_weights(flat.device, CHECKED_AT_ONCE if flat.device.type == "cpu" else CHECKED_ON_CARD)
        sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
        for number, piece in enumerate(words.split(len(weights))):
            bits = piece.to(torch.int64)
            plain = bits.sum()
            beyond = (2 * number * len(weights) * _ODD + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped to int64
            sums += torch.stack([plain, (bits * weights[: len(bits)]).sum() + plain * beyond])
        rows[row] = sums.cpu()
    return rows


@functools.cache
def _position_weights(device: torch.device, count: int) -> Tensor:
    """Returns odd weights, int64 [count], one per position. A sum with these weights also detects swapped values."""
    return (2 * torch.arange(count, device=device) + 1) * _ODD


def compare_replicas(
    tensors: dict[str, Tensor], world: World, network: ParallelNetwork | None = None
) -> tuple[str, list[int]] | None:
    """Returns (name, ranks that differ) of the first tensor with unequal replicas, or None. A collective."""
    if world.alone or not tensors:
        return None
    mine = checksums(list(tensors.values())).to(world.device)
    everybody = [torch.zeros_like(mine) for _ in range(world.size)]
    dist.all_gather(everybody, mine)
    for number, name in enumerate(tensors):
        layouts = network.layouts if network and name in network.layouts else None
        first = [layouts[name].first_holder(layouts.mesh, rank) if layouts else 0 for rank in range(world.size)]
        sums = [one[number] for one in everybody]
        different = [rank for rank, own in enumerate(sums) if not torch.equal(own, sums[first[rank]])]
        if different:
            return name, different
    return None


def check_replicas(tensors: dict[str, Tensor], world: World, step: int, network: ParallelNetwork) -> None:
    """Raises RunError if ranks hold different values of a replicated tensor. A collective."""
    drift = compare_replicas(tensors, world, network)
    if drift:
        name, ranks = drift
        shown = ", ".join(map(str, ranks))
        other = "its other copies" if network.layouts else "rank 0's"
        what = f"replicas have drifted apart: {name} on rank {shown} differs from {other} at step {step}"
        check = "check that forward doesn't update a buffer or parameter with the samples of one rank only"
        hints = (check, "or remove a machine with faulty memory or a faulty processor")
        raise RunError(what, f"rank {shown}, {name}", hints)


def equalize_replicas(tensors: dict[str, Tensor], world: World, *, always: bool = False) -> bool:
    """Broadcasts rank 0's tensors if replicas differ, or `always`. Returns True if it sent them. A collective."""
    if world.alone or not (always or compare_replicas(tensors, world)):
        return False
    for tensor in tensors.values():
        values = tensor.detach().flatten().view(torch.uint8)  # gloo sends bytes, but not all types, such as int16
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values.clone().view(tensor.dtype).view(tensor.shape))
    return True


def require_equal_networks(model: nn.Module, tensors: dict[str, Tensor], world: World) -> None:
    """Raises UserError if a rank's tensor names, shapes or frozen parameters differ from rank 0's. A collective."""
    if world.alone:
        return
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    mine = [f"{name} {list(one.shape)}{' frozen' if name in frozen else ''}" for name, one in tensors.items()]
    first, *others = gather_plain(mine, world)
    for rank, theirs in enumerate(others, 1):
        for one, other in zip_longest(first, theirs, fillvalue="nothing"):
            if one != other:
                what = f"rank {rank}'s network differs from rank 0's: {other} instead of {one}"
                raise UserError(what, "model", ("create the same network on all ranks; freeze the same parameters",))
