"""Reasons why a run depends on the number of processes, as sentences for plan.json and the report."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.parallel.apply import normalises_in_groups
from manyhands.sync.options import exception_of
from manyhands.train.trainer import Trainer

# Kinds of random masks: parts of class names (torchvision, timm, …) and attributes with a probability.
_MASKS = {
    "Dropout": (("dropout",), ("p",)),
    "Stochastic depth": (("stochasticdepth", "droppath", "drop_path"), ("drop_prob", "p")),
    "Attention dropout": (("attention",), ("dropout", "attention_dropout", "attn_dropout", "dropout_p")),
}


def exceptions(trainer: Trainer) -> list[str]:
    loss_fn = trainer.update.loss_fn
    found = [loss_fn.dependent if loss_fn else "", *_of_norms(trainer), *_of_draws(trainer)]
    found.append(exception_of(trainer.sync.cost.method))
    if not trainer.job.parallel.gradients_mean:
        summed = "Gradients are summed over processes and grow with the number of processes"
        found.append(f"{summed} (gradients_mean = false).")
    return list(filter(None, found))


def _of_norms(trainer: Trainer) -> list[str]:
    modules = trainer.network.model.modules()
    if not any(isinstance(module, _BatchNorm) for module in modules):
        return []
    local = trainer.job.train.norm_group == "local" or trainer.synchronizer.local_statistics
    if local or not normalises_in_groups(trainer.run.mode):
        return ["BatchNorm computes statistics over each process's own samples (norm_group = local)."]
    unknown = sum(not layer.rows_per_sample for layer in trainer.network.norms.layers)
    effect = "so each process computes the statistics of these layers over its own rows."
    said = f"{unknown} BatchNorm layer(s) normalise rows that can't be assigned to samples, {effect}"
    return [said] if unknown else []


def exception_of_buffers(names: list[str]) -> str:
    more = f" and {len(names) - 3} more buffers" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}: each process updates these from its own samples; all use rank 0's values."


def _of_draws(trainer: Trainer) -> list[str]:
    modules = list(trainer.network.model.modules())
    found = [kind for kind in _MASKS if any(_drops(module, kind) for module in modules)]
    if not found and trainer.network.traits.draws:
        return ["The network's random numbers in training depend on the number of processes."]
    return [f"{kind} masks depend on the number of processes." for kind in found]


def _drops(module: nn.Module, kind: str) -> bool:
    words, attributes = _MASKS[kind]
    classes = [one.__name__.lower() for one in type(module).__mro__]
    values = [getattr(module, name, 0.0) for name in attributes]
    return any(word in name for word in words for name in classes) and any(
        isinstance(value, int | float) and value > 0 for value in values
    )
