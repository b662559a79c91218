"""The optimizer and the learning rate, which is a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyhands.config.job import TrainOptions


def make_optimizer(model: nn.Module, options: TrainOptions, *, sharded: bool) -> torch.optim.Optimizer:
    """SGD or AdamW; biases and norms are kept out of weight decay unless asked for."""
    groups = _groups(model, options)
    # torch's fused kernels update all tensors in one call; sharded tensors take the ordinary path.
    fused = None if sharded else True
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused)
    else:
        nesterov = options.nesterov and options.momentum > 0
        optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=nesterov, fused=fused)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = start_state(optimizer, parameter)
    return optimizer


def start_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What an optimizer remembers of a parameter before its first update.

    torch makes it in the first step: fused SGD of whatever memory holds, which stays if a loss scaler skips that step,
    and of the parameters that this step used alone, which ends in an error once another one is used.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        # As torch counts: fused on the device, else on the CPU.
        device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if optimizer.defaults["momentum"] else {}


def _groups(model: nn.Module, options: TrainOptions) -> list[dict[str, object]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alike = options.decay_norm_and_bias or not options.weight_decay
    decayed = [p for p in trainable if p.ndim > 1 or alike]
    others = [p for p in trainable if p.ndim <= 1 and not alike]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": options.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def learning_rate(options: TrainOptions, step: int, steps_per_epoch: int) -> float:
    """The rate for update number `step`, counted from 0.

    Source for one-cycle: Smith and Topin 2017, arXiv:1708.07120, without the momentum cycle; for cosine: Loshchilov
    and Hutter 2016, arXiv:1608.03983, without restarts.
    """
    total = max(1, options.epochs * steps_per_epoch)
    if options.schedule == "one-cycle":
        return options.lr * _one_cycle(step / total)
    warmup = options.warmup_epochs * steps_per_epoch
    if step < warmup:
        return options.lr * (step + 1) / (math.floor(warmup) + 1)
    if options.schedule == "cosine":
        return options.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1.0, total - warmup))))
    if options.schedule == "step":
        return options.lr * options.step_factor ** (step // steps_per_epoch // options.step_epochs)
    return options.lr


def _one_cycle(progress: float) -> float:
    """Rises from 1/10 over the first quarter, then falls to 1/1000, along cosines."""
    rise = 0.25
    if progress < rise:
        return 0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi * progress / rise))
    falling = min(1.0, (progress - rise) / (1 - rise))
    return 0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * falling))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group."""
    groups: Iterable[dict[str, object]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate
