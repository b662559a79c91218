"""The optimizer, built-in or custom, and the learning rates of each update.

Rates follow a built-in schedule, a custom function of the step, or a torch scheduler.
"""

import contextlib
import inspect
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.user_code import user_line
from manyhands.data.order import Order
from manyhands.parallel.network import is_dtensor, shard_like
from manyhands.train.objects import MakeOptimizer, load_user_object

# Keys of a parameter group: the learning rate as a fraction of the largest (custom), or as a multiple of train.lr.
_OF_PEAK, _OF_LR = "of_peak_lr", "of_lr"
_WHERE, _SCHEDULE = "train.optimizer", "train.schedule"
# Keys that torch's schedulers add to each group.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
_PLAIN_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}
SetRates = Callable[[int], None]  # sets the learning rates for an update, given its index from 0


def make_custom_optimizer(make: MakeOptimizer, model: nn.Module) -> Optimizer:
    """Creates the user's optimizer of the trainable parameters. Stores the relative learning rates of its groups."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = make(list(parameters))
    if not isinstance(optimizer, Optimizer):
        hints = ("return a torch.optim.Optimizer, such as lambda parameters: torch.optim.RMSprop(parameters)",)
        raise UserError(f"the optimizer function returned a {type(optimizer).__name__}", _WHERE, hints)
    kind = type(optimizer).__name__
    needed = inspect.signature(optimizer.step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        what = f"{kind} needs a closure that computes the loss again, which manyhands doesn't support"
        raise UserError(what, _WHERE, ("choose an optimizer whose step() needs no closure",))
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if optimized - {id(parameter) for parameter in parameters}:
        raise UserError(f"{kind} has a parameter that isn't a trainable parameter of the network", _WHERE)
    missing = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in optimized]
    if missing:
        hints = ("pass all parameters to the optimizer", "or freeze the parameter: parameter.requires_grad = False")
        raise UserError(f"{kind} doesn't have the trainable parameter {missing[0]}", _WHERE, hints)
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    if not all(isinstance(rate, int | float) for rate in rates) or max(rates, default=0.0) <= 0:
        raise UserError(f"{kind} has no usable learning rate: {rates}", _WHERE, ("pass lr=… above 0",))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group[_OF_PEAK] = rate / max(rates)
    _start_momentum(optimizer)
    return optimizer


def _start_momentum(optimizer: Optimizer) -> None:
    """Initializes the momentum of fused SGD. torch leaves it uninitialized if the first update is skipped."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if not (group["fused"] and group["momentum"]):
            continue
        if group["dampening"]:
            what = "fused SGD with dampening starts from uninitialized momentum if its first update is skipped"
            raise UserError(what, _WHERE, ("remove fused=True", "or remove dampening"))
        for parameter in group["params"]:
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def mark_custom_optimizer(optimizer: Optimizer) -> None:
    """Marks an optimizer as the user's, so that its relative learning rates are not changed."""
    for group in optimizer.param_groups:
        group[_OF_PEAK] = 1.0
    _start_momentum(optimizer)


def is_custom_optimizer(optimizer: Optimizer) -> bool:
    return _OF_PEAK in optimizer.param_groups[0]


def largest_learning_rate(optimizer: Optimizer) -> float:
    """Returns the largest learning rate of all groups, without the multiplier train.bias_rate."""
    return max(float(group["lr"]) / group.get(_OF_LR, 1.0) for group in optimizer.param_groups)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the learning rate of each parameter group to `rate` times the group's initial relative rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(_OF_PEAK, 1.0) * group.get(_OF_LR, 1.0)


def restore_optimizer(saved: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> str:
    """Restores an optimizer's state by parameter name. Ignores saved parameters that the optimizer doesn't have.

    Resets a parameter's state if no state was saved, for example of a frozen parameter, or if another optimizer saved
    it. Returns a sentence if another optimizer saved it, else "". With a plan, `saved` has this process's shards.
    """
    entries, groups, custom = saved["state"], saved.get("param_groups", []), is_custom_optimizer(optimizer)
    kind, other_keys = type(optimizer).__name__, set[str]()
    if custom and entries and (not groups or (set(groups[0]) ^ set(optimizer.param_groups[0])) - _OF_SCHEDULERS):
        return f"the state of {kind} is reset: the saved state is of another optimizer"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = dict[int, dict[str, Any]]()
    for number, parameter in enumerate(order):
        found = entries.get(names[id(parameter)], {})
        if not custom:
            fresh = initial_state(optimizer, parameter)
            found = {key: value for key, value in found.items() if value is not None}
            shapes = {
                key: torch.as_tensor(value).shape if isinstance(value, Tensor | int | float) else None
                for key, value in found.items()
            }
            if shapes == {key: value.shape for key, value in fresh.items()}:
                found = {key: torch.as_tensor(value, dtype=fresh[key].dtype) for key, value in found.items()}
            else:
                other_keys |= found.keys() if fresh else set()
                found = fresh
        if found:
            state[number] = {key: _copy_in_layout(value, parameter) for key, value in found.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for number, values in state.items():
        live = optimizer.state[order[number]]
        # torch converts all but the count of steps to the parameter's dtype, which may not be the saved one (NAdam).
        live.update({key: live[key].to(one.dtype) for key, one in values.items() if isinstance(one, Tensor)})
    if custom:
        _start_momentum(optimizer)
    named = ", ".join(sorted(other_keys))
    return f"the state of {kind.lower()} is reset: the saved state is of another optimizer ({named})" if named else ""


def _copy_in_layout(value: Any, parameter: Tensor) -> Any:
    """Copies a saved tensor. If it has the parameter's shape, the copy has the parameter's strides and sharding."""
    if isinstance(value, Tensor) and parameter.ndim and value.shape == parameter.shape:
        if is_dtensor(parameter):
            return value if is_dtensor(value) else shard_like(value.to(parameter.device), parameter)
        # With the parameter's strides: fused optimizers read memory in order.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.clone() if isinstance(value, Tensor) else value


Kind = TypeVar("Kind", bound=Optimizer)
_WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def _without_torch_wrappers(kind: type[Kind], fused_step: Callable[[Any], bool] = lambda _: False) -> type[Kind]:
    """Returns the optimizer class without torch's wrappers around its methods.

    torch's wrapper that prevents compilation imports the compiler at the first call, which takes as long as importing
    torch. The wrapper for hooks and the profiler takes 5 % of a small network's update; it is used if there are hooks.
    `fused_step` tries a faster update, and returns True if it succeeded.
    """
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _WRAPPED}
    update = torch.no_grad()(inspect.unwrap(kind.step))
    hooked = Optimizer.profile_hook_step(update)
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)

    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        if any((self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *of_all)):
            return hooked(self, *arguments, **named)
        return None if not (arguments or named) and fused_step(self) else update(self, *arguments, **named)

    vars(step)["hooked"] = True  # otherwise torch wraps it
    return cast(type[Kind], type(kind.__name__, (kind,), {**methods, "step": step}))


def _step_fused_sgd(optimizer: torch.optim.SGD) -> bool:
    """Calls torch's fused SGD kernel without grouping tensors by kind. Returns False if that isn't possible."""
    calls: list[tuple[list[Tensor], list[Tensor], list[Tensor], dict[str, Any]]] = []
    kinds: set[Any] = set()
    for group in optimizer.param_groups:
        used = [one for one in group["params"] if one.grad is not None]
        gradients = [one.grad for one in used]
        buffers = [optimizer.state[one].get("momentum_buffer") for one in used] if group["momentum"] else []
        kinds.update([(one.dtype, one.device, its.dtype, its.layout) for one, its in zip(used, gradients, strict=True)])
        if not group["fused"] or any(one is None for one in buffers):
            return False
        if used:
            calls.append((used, gradients, buffers, {name: group[name] for name in _SGD_TAKES}))
    if len(kinds) > 1 or hasattr(optimizer, "found_inf") or any(kind[-1] != torch.strided for kind in kinds):
        return False
    with _NO_GRAD:
        for used, gradients, buffers, numbers in calls:
            torch._fused_sgd_(used, gradients, buffers, is_first_step=False, **numbers)
    return True


_NO_GRAD = torch.no_grad()
_SGD_TAKES = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")
# The classes keep torch's names, so that an optimizer can be pickled.
SGD, AdamW = _without_torch_wrappers(torch.optim.SGD, _step_fused_sgd), _without_torch_wrappers(torch.optim.AdamW)


def make_optimizer(
    model: nn.Module, options: TrainOptions, *, sharded: bool, custom: MakeOptimizer | None = None
) -> Optimizer:
    """Creates the optimizer of the job, or with `custom`. The job's doesn't decay biases and norms by default."""
    if (make := load_user_object(_WHERE, options.optimizer, custom)) is not None:
        if not callable(make):
            hints = ("name a function of the parameters that returns a torch.optim.Optimizer",)
            raise UserError(f"{options.optimizer} is a {type(make).__name__}, not a function", _WHERE, hints)
        return make_custom_optimizer(cast(MakeOptimizer, make), model)
    groups, rate, momentum = _parameter_groups(model, options), options.lr, options.momentum
    # torch's fused kernels update all tensors in one call; sharded tensors take the ordinary path.
    fused = None if sharded else True
    if options.optimizer == "adamw":
        optimizer: Optimizer = AdamW(groups, lr=rate, betas=options.betas, fused=fused)
    else:
        optimizer = SGD(groups, lr=rate, momentum=momentum, nesterov=options.nesterov and momentum > 0, fused=fused)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = initial_state(optimizer, parameter)
    return optimizer


def initial_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the optimizer's initial state of a parameter: tensors by name.

    torch itself creates state in the first step. Fused SGD's state would be uninitialized memory if a loss scaler skips
    that step, and a parameter that gets a gradient only later would have no state, which raises an error.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        # torch counts steps on the device if fused, else on the CPU.
        device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if optimizer.defaults["momentum"] else {}


def state_values_per_parameter(options: TrainOptions) -> int:
    """Returns the number of optimizer state values for each parameter value, such as 2 for AdamW."""
    if options.optimizer != "sgd":
        return 2  # unknown for a custom optimizer; most have two, like adamw
    return 1 if options.momentum else 0


def total_steps(options: TrainOptions, steps_per_epoch: int) -> int:
    """Returns the step at which a job ends, counted from epoch 0 even if train.start_epoch is later."""
    steps = options.epochs * steps_per_epoch
    return min(steps, options.max_steps) if options.max_steps else steps


def count_updates(options: TrainOptions, samples: int) -> int:
    """Returns the number of updates of a job on `samples` training samples, at least one."""
    order = Order(samples, min(options.batch, samples), options.seed, options.drop_last)
    begun = options.start_epoch * order.steps_per_epoch
    return max(1, total_steps(options, order.steps_per_epoch) - begun)


def _parameter_groups(model: nn.Module, options: TrainOptions) -> list[dict[str, object]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay, rate = options.weight_decay, options.bias_rate
    bias_decay = decay if options.decay_norm_and_bias else 0.0
    single = rate == 1 and bias_decay == decay
    weights = [p for p in trainable if p.ndim > 1 or single]
    biases = [p for p in trainable if p.ndim <= 1 and not single]
    groups: list[dict[str, object]] = [{"params": weights, "weight_decay": decay}]
    # Divided by the factor, because an update multiplies the decay by the learning rate.
    groups.append({"params": biases, "weight_decay": bias_decay / rate, "lr": options.lr * rate, _OF_LR: rate})
    return [group for group in groups if group["params"]]


def learning_rate(options: TrainOptions, step: int, steps_per_epoch: int) -> float:
    """Returns the learning rate for update `step`, counted from 0.

    Sources: one-cycle is Smith and Topin 2017, arXiv:1708.07120, without the momentum cycle; cosine is Loshchilov and
    Hutter 2016, arXiv:1608.03983, without restarts.
    """
    total = max(1, options.epochs * steps_per_epoch)
    if options.schedule == "one-cycle":  # from 1/10 over the first quarter, then to 1/1000, along cosines
        progress, rise = step / total, 0.25
        if progress < rise:
            return options.lr * (0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi * progress / rise)))
        falling = min(1.0, (progress - rise) / (1 - rise))
        return options.lr * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * falling)))
    warmup = options.warmup_epochs * steps_per_epoch
    if step < warmup:
        return options.lr * (step + 1) / (math.floor(warmup) + 1)
    if options.schedule == "cosine":
        return options.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1.0, total - warmup))))
    if options.schedule == "step":
        return options.lr * options.step_factor ** (step // steps_per_epoch // options.step_epochs)
    return options.lr


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Returns a scheduler's state as JSON data, without functions. Raises UserError for types that JSON lacks."""
    found = dict[str, Any]()
    for name, value in scheduler.state_dict().items():
        try:
            found.update({} if _is_constant(value) else {name: as_plain_data(value)})
        except TypeError as error:
            kind = type(scheduler).__name__
            hints = ("store only numbers, strings, lists and dicts", "or return only those from state_dict")
            what = f"the attribute {name} of the scheduler {kind} is a {error}, which can't be saved"
            raise UserError(what, f"{kind}.state_dict", hints) from None
    return found


def restore_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Restores a scheduler from the result of `scheduler_state`. Invalid data may raise any exception."""
    given = {name: from_plain_data(value) for name, value in state.items()}
    if not isinstance(given.get("last_epoch", 0), int):
        raise ValueError(f"last_epoch is not an integer: {str(given['last_epoch'])[:60]}")
    scheduler.load_state_dict({**scheduler.state_dict(), **given})
    # Otherwise torch warns that the scheduler's step comes before the optimizer's.
    scheduler.optimizer.__dict__["_opt_called"] = True


@contextlib.contextmanager
def scheduler_errors(where: str) -> Generator[None]:
    """Converts exceptions in the context to a UserError about the scheduler's state in the checkpoint `where`."""
    try:
        yield
    except Exception as error:
        what = f"the scheduler's state in the checkpoint can't be restored: {type(error).__name__}: {error}"
        hints = ("remove this checkpoint to resume from the previous one", "or start a new run in another folder")
        raise UserError(what, where, hints) from error


def as_plain_data(value: Any) -> Any:
    """Converts numbers, strings, None, lists, tuples and dicts to JSON data. Raises TypeError naming another type."""
    kind = type(value).__name__
    if type(value) is dict:
        return {kind: [[as_plain_data(key), as_plain_data(one)] for key, one in value.items() if not _is_constant(one)]}
    if type(value) in (list, tuple):
        return {kind: [as_plain_data(one) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(kind)


def from_plain_data(value: Any) -> Any:
    """Converts the result of `as_plain_data` back. Raises ValueError, TypeError or KeyError for other data."""
    if isinstance(value, list):
        raise TypeError("unsupported list")
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    return _PLAIN_KINDS[kind](from_plain_data(one) if kind != "dict" else map(from_plain_data, one) for one in entries)


def _is_constant(value: Any) -> bool:
    return callable(value) or isinstance(value, Counter)


def make_schedule(optimizer: Optimizer, options: TrainOptions, steps_per_epoch: int, custom: Any = None) -> SetRates:
    """Creates the function that sets the learning rates of a step. Tests a custom schedule at step 0."""
    function = load_user_object(_SCHEDULE, options.schedule, custom)
    if is_custom_optimizer(optimizer):
        options = options.model_copy(update={"lr": largest_learning_rate(optimizer)})
    if function is None:
        return lambda step: set_learning_rate(optimizer, learning_rate(options, step, steps_per_epoch))
    of_optimizer, asked = _schedule_arguments(function, max(1, options.epochs * steps_per_epoch), steps_per_epoch)

    def set_rates(step: int) -> None:
        set_learning_rate(optimizer, options.lr * _check_rate_factor(function(step, **asked), step))

    try:
        if of_optimizer:
            scheduler = CustomScheduler(function(optimizer, **asked), optimizer)
            if scheduler.waits and not options.evaluate_every:
                what = "the schedule needs evaluations, but evaluate_every=0 evaluates only at the end"
                raise UserError(what, _SCHEDULE, ("set train.evaluate_every to 1, or choose another schedule",))
            return scheduler
        set_rates(0)
    except UserError:
        raise
    except Exception as error:
        given = "with this optimizer" if of_optimizer else "at step 0"
        what = f"the schedule failed {given}: {type(error).__name__}: {error}"
        hints = () if of_optimizer else ("for a torch scheduler, name the function's first parameter optimizer",)
        raise UserError(what, user_line(error) or _SCHEDULE, hints) from error
    return set_rates


def _schedule_arguments(function: Any, total_steps: int, steps_per_epoch: int) -> tuple[bool, dict[str, int]]:
    """Returns two values: True if a schedule takes the optimizer instead of the step, and its other arguments."""
    of_step = "pass a function of the step: schedule=lambda step: 0.99 ** step"
    if not callable(function):
        of_optimizer = "or of the optimizer: schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9)"
        kind = type(function).__name__
        raise UserError(f"the schedule is a {kind}, not a function", _SCHEDULE, (of_step, of_optimizer))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions in C have no signature
        return False, {}
    if not parameters:
        raise UserError("the schedule takes no argument", _SCHEDULE, (of_step,))
    first, *others = parameters
    known = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    for one in others:
        required = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if required and one.name not in known:
            hints = ("besides the first parameter, use only total_steps and steps_per_epoch",)
            raise UserError(f"the schedule function has an unknown parameter: {one.name}", _SCHEDULE, hints)
    return first.name == "optimizer", {one.name: known[one.name] for one in others if one.name in known}


def _check_rate_factor(value: Any, step: int) -> float:
    """Returns a custom schedule's result, a factor of the peak rate. Raises UserError unless finite and >= 0."""
    try:
        part = float(value)
    except (TypeError, ValueError):
        hints = ("return a number, the factor of the peak learning rate",)
        raise UserError(f"the schedule returned a {type(value).__name__} at step {step}", _SCHEDULE, hints) from None
    if not math.isfinite(part) or part < 0:
        hints = ("return the factor of the peak learning rate, 0 or higher",)
        raise UserError(f"the schedule returned {part} at step {step}", _SCHEDULE, hints)
    return part


class CustomScheduler:
    """Steps a torch scheduler before each update except the first (ReduceLROnPlateau: after each evaluation).

    A resumed run repeats all steps of torch's own schedulers, so that a longer run has the rates of its new length. The
    state of ReduceLROnPlateau and of custom classes is saved, because it may depend on more than the step. If a custom
    class has other arguments on resume (for a longer run), its steps are repeated instead.
    """

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        kind = self._kind = type(scheduler).__name__
        if not isinstance(scheduler, LRScheduler):
            hints = ("return a torch.optim.lr_scheduler.LRScheduler of the optimizer",)
            raise UserError(f"the schedule function returned a {kind}", _SCHEDULE, hints)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            hints = ("create the scheduler from the function's argument",)
            raise UserError(f"the schedule's {kind} belongs to another optimizer", _SCHEDULE, hints)
        self.waits = isinstance(scheduler, ReduceLROnPlateau)  # needs the loss
        self._scheduler: Any = scheduler
        if self.waits and self._scheduler.mode != "min":
            raise UserError(f'{kind} monitors the loss, but has mode="max"', _SCHEDULE, ('set mode="min"',))
        self._optimizer, self._made = optimizer, 0
        self._as_made = self._state() if self.waits or not _consists_of_torch_schedulers(scheduler) else None

    def __call__(self, step: int) -> None:
        if self.waits:
            return
        # catch_warnings makes torch repeat the warnings of earlier updates, so usual steps don't enter it.
        usual = 0 < self._made == step - 1
        with contextlib.nullcontext() if usual else warnings.catch_warnings():
            if not usual:  # a resumed run has made no update yet, or a loss scaler skipped the first
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while self._made < step:
                self._scheduler.step()
                self._made += 1

    def step_with_loss(self, loss: float) -> None:
        """Calls ReduceLROnPlateau's `step` with the loss of an evaluation. Does nothing for other schedulers."""
        if self.waits:
            self._scheduler.step(loss)

    def state_text(self) -> str:
        """Returns the scheduler's state as JSON text, or "" for a scheduler whose steps are repeated on resume."""
        if self._as_made is None:
            return ""
        return json.dumps({"kind": self._kind, "made": self._made, "as_made": self._as_made, "now": self._state()})

    def resume(self, saved: str, step: int) -> None:
        """Restores the result of `state_text` if it matches this scheduler and `step`. May raise any exception."""
        if (made := self._as_made) is None:
            return
        found = json.loads(saved)
        before, now = found["as_made"], found["now"]
        changed = _changed_values(before["state"], now["state"])
        alike = all(made["state"].get(name) == one for name, one in before["state"].items() if name not in changed)
        if found["kind"] != self._kind or not (self.waits or (alike and found["made"] == max(0, step - 1))):
            return
        restore_scheduler(self._scheduler, changed)
        if not self.waits or before["groups"] == made["groups"]:
            for live, *both in zip(self._optimizer.param_groups, before["groups"], now["groups"], strict=True):
                live.update({name: from_plain_data(one) for name, one in _changed_values(*both).items()})
        self._made = int(found["made"])

    def _state(self) -> dict[str, Any]:
        groups = [
            {name: as_plain_data(one) for name, one in group.items() if type(one) in (int, float, tuple)}
            for group in self._optimizer.param_groups
        ]
        return {"state": scheduler_state(self._scheduler), "groups": groups}


def _consists_of_torch_schedulers(scheduler: Any) -> bool:
    """Returns True if a scheduler and all schedulers that it contains are of torch's own classes."""
    inner = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__.startswith("torch.") and all(map(_consists_of_torch_schedulers, inner))


def _changed_values(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in now.items() if name not in before or before[name] != one}
