"""Finds the origin of a non-finite value."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from manyhands.core.errors import RunError
from manyhands.core.world import World
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import MicroBatch, ParallelNetwork
from manyhands.train.feed import StepSums

_SHOWN = 8  # samples
ADVICE = "reduce train.lr, set train.warmup_epochs = 1, or set train.clip = 1.0"
HINTS = (ADVICE, "with fp16, use bf16 or fp32 instead")
INPUT_HINTS = ("check these samples (counted from 0 in the training split) and the code that prepares samples",)


def explain_loss(
    network: ParallelNetwork, part: MicroBatch, world: World, step: int, *, closely: bool = True
) -> RunError:
    """Returns the error for a non-finite loss on this process; `closely` names the first non-finite tensor.

    Only this process calls this function, so a sharded network, which needs other processes, isn't searched.
    """
    images, samples = part.inputs, part.samples
    assert samples is not None
    finite = is_finite(images)
    if not finite and len(images) == len(samples):
        samples = samples[~torch.isfinite(images).reshape(len(images), -1).all(1).cpu()]
    some = ", ".join(map(str, samples[:_SHOWN].tolist())) + (" …" if len(samples) > _SHOWN else "")
    where = f"rank {world.rank}, step {step}, samples {some}"
    if not finite:
        what = "the loss is not finite, because the input pictures contain NaN or infinity"
        return RunError(what, where, INPUT_HINTS)
    found = f": {_first_bad(network.model, images)}" if closely and not network.share.collective_forward else ""
    return RunError(f"the loss is not finite{found}", where, HINTS)


def _first_bad(model: nn.Module, images: Tensor) -> str:
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"parameter {name} is {kind_of(parameter)}"
    found, names = list[str](), {module: name or "the network" for name, module in model.named_modules()}

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and module in names and not found and not is_finite(output):
            found.append(f"the output of {names[module]} is {kind_of(output)}")

    hook = register_module_forward_hook(look)
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train()
        hook.remove()
    return found[0] if found else "all outputs are finite, so the loss function is the cause"


def explain_lost(network: ParallelNetwork, world: World, measured: StepSums) -> RunError:
    """Returns the error for a non-finite value that a periodic check (of losses or checkpoints) found; a collective."""
    mine = [float(measured.first_bad), float(measured.first_spoilt)]
    by_rank: list[list[float]] = gather_plain(mine, world)
    step = min(map(min, by_rank))
    named = [(f"parameter {name}", one) for name, one in network.model.named_parameters()]
    named += [
        (f"buffer {name}", one) for name, one in network.model.named_buffers() if name not in network.traits.endless
    ]
    lost = next((name for name, one in named if not is_finite(one)), "")
    hints = (*HINTS, "resume from the last checkpoint, which was saved before this error")
    if not math.isfinite(step):
        what = f"{lost or 'a part of the network'} is not finite, although every loss was finite"
        return RunError(what, "an update", hints)
    # A non-finite loss makes the gradients of the same step non-finite, on all processes.
    kind = 0 if any(bad == step for bad, _ in by_rank) else 1
    rank = next(rank for rank, seen in enumerate(by_rank) if seen[kind] == step)
    what = f"{('the loss', 'a gradient')[kind]} is not finite" + (f", and {lost} is not finite either" if lost else "")
    return RunError(what, f"rank {rank}, step {step:.0f}", hints)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


def kind_of(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
