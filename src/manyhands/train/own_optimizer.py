"""An optimizer of the user's own: made by their function, with the state that torch's `state_dict` tells."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.parallel.spread import is_spread, spread_like
from manyhands.train.objects import brought

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Of each group: its learning rate as a part of the largest one, which the schedule moves.
_OF_PEAK = "of_peak_lr"
# The same of a group of ours, as a multiple of the job's rate.
OF_LR = "of_lr"
_WHERE = "train.optimizer"
# What torch's schedulers note in each group.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def own_maker(options: TrainOptions, given: MakeOptimizer | None) -> MakeOptimizer | None:
    """The user's function, from Python or from their file; None where the job names an optimizer of ours.

    Raises:
        UserError: the file has no such function, or it was an object of a program that has ended.
    """
    make: Any = brought(_WHERE, options.optimizer, given)
    if make is not None and not callable(make):
        hints = ("name a function of the parameters that returns a torch.optim.Optimizer",)
        raise UserError(f"{options.optimizer} is a {type(make).__name__}, not a function", _WHERE, hints)
    return cast(MakeOptimizer | None, make)


def make_custom(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The user's optimizer of a network's trainable parameters, each group's learning rate noted.

    Raises:
        UserError: the function gives something else, or an optimizer that can't be used.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = make(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        hints = ("return a torch.optim.Optimizer, such as lambda parameters: torch.optim.RMSprop(parameters)",)
        raise UserError(f"the optimizer function returned a {type(optimizer).__name__}", _WHERE, hints)
    kind = type(optimizer).__name__
    needed = inspect.signature(optimizer.step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        what = f"{kind} needs a closure that computes the loss again, which manyhands doesn't support"
        raise UserError(what, _WHERE, ("choose an optimizer whose step() needs no closure",))
    known = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(f"{kind} has a parameter that isn't a trainable parameter of the network", _WHERE)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in held]
    if left_out:
        hints = ("pass all parameters to the optimizer", "or freeze the parameter: parameter.requires_grad = False")
        raise UserError(f"{kind} doesn't have the trainable parameter {left_out[0]}", _WHERE, hints)
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    if not all(isinstance(rate, int | float) for rate in rates) or max(rates, default=0.0) <= 0:
        raise UserError(f"{kind} has no usable learning rate: {rates}", _WHERE, ("pass lr=… above 0",))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group[_OF_PEAK] = rate / max(rates)
    _start_momentum(optimizer)
    return optimizer


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Initializes fused SGD's momentum, which torch leaves uninitialized if the first update is skipped.

    See `optimize.start_state`. Raises UserError: with dampening, torch doesn't start from a momentum of zero.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if not (group["fused"] and group["momentum"]):
            continue
        if group["dampening"]:
            what = "fused SGD with dampening starts from uninitialized momentum if its first update is skipped"
            raise UserError(what, _WHERE, ("remove fused=True", "or remove dampening"))
        for parameter in group["params"]:
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def mark_own(optimizer: torch.optim.Optimizer) -> None:
    """Notes that an optimizer is the user's, whose rates nobody else moves."""
    for group in optimizer.param_groups:
        group[_OF_PEAK] = 1.0
    _start_momentum(optimizer)


def is_custom(optimizer: torch.optim.Optimizer) -> bool:
    """True for what `make_custom` has made or `mark_own` noted."""
    return _OF_PEAK in optimizer.param_groups[0]


def with_own_rate(options: TrainOptions, optimizer: torch.optim.Optimizer) -> TrainOptions:
    """The options with the peak learning rate that the user's optimizer says; of one of ours as they are."""
    return options.model_copy(update={"lr": largest_rate(optimizer)}) if is_custom(optimizer) else options


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate as it stands, of the group that learns fastest; of ours the job's."""
    return max(float(group["lr"]) / group.get(OF_LR, 1.0) for group in optimizer.param_groups)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group, in the proportions that the optimizer began with."""
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate * group.get(_OF_PEAK, 1.0) * group.get(OF_LR, 1.0)


def restore_own(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Gives the user's optimizer its saved state by parameter name.

    Args:
        saved: as `restore_optimizer` takes it.
        model: the network whose parameters they are.
        optimizer: as it was just made.

    Returns:
        A sentence that says what starts anew; empty if nothing does.
    """
    groups, entries = saved.get("param_groups", []), saved["state"]
    kind = type(optimizer).__name__
    if entries and (not groups or (set(groups[0]) ^ set(optimizer.param_groups[0])) - _OF_SCHEDULERS):
        return f"the state of {kind} is reset; the checkpoint has another optimizer's"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: {key: _like(value, parameter) for key, value in entries[names[id(parameter)]].items()}
        for number, parameter in enumerate(order)
        if names[id(parameter)] in entries
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, saved_entries in state.items():
        live = optimizer.state[order[number]]
        # torch turns all but the count of steps into the parameter's type, which isn't what was saved (NAdam).
        live.update({key: live[key].to(one.dtype) for key, one in saved_entries.items() if isinstance(one, Tensor)})
    _start_momentum(optimizer)
    return ""


def _like(value: Any, parameter: Tensor) -> Any:
    """A saved tensor in the layout of its parameter, where it has the parameter's shape."""
    if isinstance(value, Tensor) and is_spread(parameter) and value.shape == parameter.shape:
        return spread_like(value.to(parameter.device), parameter)
    return value.clone() if isinstance(value, Tensor) else value
