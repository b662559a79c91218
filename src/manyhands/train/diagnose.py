"""Finds the origin of a non-finite value."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import RunError
from manyhands.core.world import World
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.feed import LoadedMicroBatch, StepSums
from manyhands.train.monitors import ADVICE

HINTS = (
    ADVICE,
    "with fp16, use bf16 or fp32 instead",
)
INPUT_HINTS = ("check these samples (counted from 0 in the training split) and the code that prepares samples",)


def explain_loss(
    network: ParallelNetwork, part: LoadedMicroBatch, world: World, step: int, *, closely: bool = True
) -> RunError:
    """Returns the error for a non-finite loss on this process; `closely` names the first non-finite tensor.

    Only this process calls this function, so a sharded network, which needs other processes, isn't searched.
    """
    batch = part.batch
    spoilt = batch.samples[~_finite_samples(batch.images)] if len(batch.images) == len(batch.samples) else batch.samples
    where = f"rank {world.rank}, step {step}, samples {_some(spoilt if len(spoilt) else batch.samples)}"
    if not is_finite(batch.images):
        return RunError(
            "the loss is not finite, because the input pictures contain NaN or infinity", where, INPUT_HINTS
        )
    found = f": {_first_bad(network.model, batch.images)}" if closely and not network.share.collective_forward else ""
    return RunError(f"the loss is not finite{found}", where, HINTS)


def _some(samples: Tensor, most: int = 8) -> str:
    text = ", ".join(map(str, samples[:most].tolist()))
    return f"{text} …" if len(samples) > most else text


def _first_bad(model: nn.Module, images: Tensor) -> str:
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"parameter {name} is {kind_of(parameter)}"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not is_finite(output):
                found.append(f"the output of {name or 'the network'} is {kind_of(output)}")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    return found[0] if found else "all outputs are finite, so the loss function is the cause"


def explain_lost(network: ParallelNetwork, world: World, measured: StepSums) -> RunError:
    """Returns the error for a non-finite value that a periodic check (of losses or checkpoints) found; a collective.

    Args:
        network: the network whose parameters and buffers are searched.
        world: the processes.
        measured: the sums of this process.
    """
    mine = [float(measured.first_bad), float(measured.first_spoilt)]
    everybody: list[list[float]] = gather_plain(mine, world)
    step = min(map(min, everybody))
    # A loss that isn't finite spoils the gradients of its own step, on all processes.
    first = [rank for rank, seen in enumerate(everybody) if seen[0] == step]
    rank = first[0] if first else next(rank for rank, seen in enumerate(everybody) if seen[1] == step)
    spoilt = "the loss" if first else "a gradient"
    lost = next((name for name, one in network.model.named_parameters() if not is_finite(one)), "")
    lost = lost and f"parameter {lost}"
    for name, buffer in network.model.named_buffers():
        if not lost and name not in network.traits.endless and not is_finite(buffer):
            lost = f"buffer {name}"
    hints = (*HINTS, "resume from the last checkpoint, which was saved before this error")
    if not math.isfinite(step):
        what = f"{lost or 'a part of the network'} is not finite, although every loss was finite"
        return RunError(what, "an update", hints)
    what = f", and {lost} is not finite either" if lost else ""
    return RunError(f"{spoilt} is not finite{what}", f"rank {rank}, step {step:.0f}", hints)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


def _finite_samples(images: Tensor) -> Tensor:
    """Returns bool [n] on the CPU: True for samples with finite values only."""
    return torch.isfinite(images).flatten(1).all(1).cpu() if images.dim() > 1 else torch.isfinite(images).cpu()


def kind_of(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
