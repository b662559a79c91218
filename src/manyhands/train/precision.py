"""Selects the precision and memory format of a job from a short measurement, the same for any number of processes."""

import contextlib
import copy
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from manyhands.checkpoint.files import STATE, read_plain
from manyhands.checkpoint.folders import find_checkpoint
from manyhands.checkpoint.trained import find_record
from manyhands.config.job import MEASURED, Job, TrainOptions
from manyhands.config.load import written_values
from manyhands.core.devices import has_native_bf16, wait_for_device
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.seeds import derive_seed
from manyhands.core.user_code import code_digests
from manyhands.core.world import World
from manyhands.data.splits import Splits
from manyhands.data.transforms import Pixels
from manyhands.models.build import build_model
from manyhands.parallel.apply import takes_mesh
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.planner.timing import OpTimes, timing_environment
from manyhands.train.data_setup import class_names, make_loader, open_splits, pixels_for
from manyhands.train.feed import seeded_generators
from manyhands.train.loss import make_loss_fn
from manyhands.train.objects import Objects
from manyhands.train.parts import prepare_on_device
from manyhands.train.trial_step import StepProbe

EXACT, HALF = "fp32", "bf16"
LEAST_GAIN, LEAST_GAIN_OF_LAYOUT = 1.3, 1.05  # smallest speedups that select bf16 and channels_last
# Rounds after the first one: at least two, more within 0.4 s; none begins after 2 s.
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S, _MOST_S = 2, 40, 0.4, 2.0
# Pixels of a measured pass, and limits of its samples: 16 of CIFAR-10, 4 of ImageNet. Larger passes gain more.
_PIXELS, _MIN, _MOST = 16 * 32 * 32, 4, 64
_SMALL = 1_000_000  # parameters; smaller networks without a convolution gain nothing by bf16


@dataclass(frozen=True)
class Variant:
    """A combination of precision and memory format."""

    precision: str
    channels_last: bool

    def __str__(self) -> str:
        return f"{self.precision} {'channels_last' if self.channels_last else 'contiguous'}"


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine, and the seconds of each variant measured on it."""

    name: str  # of the processor or accelerator
    bf16: bool  # has native bf16
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # of forward and backward, by variant
    failed: Mapping[str, str] = field(default_factory=dict[str, str])  # the network's error, by variant


def variants_of(options: TrainOptions, *, bf16: bool) -> list[Variant]:
    """Returns the variants to compare for the "auto" options. `bf16`: True if all machines have native bf16."""
    precisions = [EXACT, *([HALF] if bf16 else [])] if options.precision == "auto" else [options.precision]
    layouts = [False, True] if options.channels_last == "auto" else [options.channels_last]
    return [Variant(precision, layout) for precision in precisions for layout in layouts]


def choose_variant(options: TrainOptions, kinds: Sequence[MachineKind]) -> tuple[Variant, list[str]]:
    """Returns the variant for all machines of a run, and a list with a reason for each measured "auto" option."""

    def layout(precision: str) -> tuple[Variant, list[str]]:
        if options.channels_last != "auto":
            return Variant(precision, options.channels_last), []
        pays, why = _is_faster(kinds, Variant(precision, False), Variant(precision, True), LEAST_GAIN_OF_LAYOUT)
        return Variant(precision, pays), [f"train.channels_last is {str(pays).lower()}: {one}" for one in why]

    if options.precision != "auto":
        return layout(options.precision)
    (exact, _), (half, _), without = layout(EXACT), layout(HALF), [kind.name for kind in kinds if not kind.bf16]
    pays, why = _is_faster(kinds, exact, half, LEAST_GAIN)
    if without:
        pays, why = False, [f"{without[0]} has no native bf16"]
    taken, said = layout(HALF if pays else EXACT)
    return taken, [*(f"train.precision is {taken.precision}: {one}" for one in why), *said]


def _is_faster(kinds: Sequence[MachineKind], before: Variant, after: Variant, gain: float) -> tuple[bool, list[str]]:
    """Tests if `after` is `gain` times as fast as `before` on all machines. Also returns a reason, if any."""
    # A kind of machine that failed at a variant gains nothing; a failure of all variants is reported elsewhere.
    seconds = [(kind.seconds.get(str(before), 0.0), kind.seconds.get(str(after), 0.0)) for kind in kinds]
    gained = min(old / new if old and new else 0.0 for old, new in seconds)
    if gained:
        said = f"{after} is {gained:.2f} times as fast as {before} in a short measurement"
        return gained >= gain, [said if gained >= gain else f"{said}, below the threshold of {gain}"]
    failed = [kind.failed[str(after)] for kind in kinds if str(after) in kind.failed and kind.seconds]
    return False, [f"the benchmark of {after} failed ({one})" for one in failed[:1]]


# An update to be timed: a function that prepares the update, and a function that runs it and returns the loss [].
Trial = tuple[Callable[[], None], Callable[[], torch.Tensor]]


def time_variants(trials: Mapping[Any, Trial], device: str) -> tuple[dict[str, float], dict[str, str]]:
    """Times variants on one thread. Returns dicts of the shortest time in seconds and of errors, by variant."""
    # Processor time depends neither on the number of processes nor on the load of the machine.
    clock = time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    seconds, failed, threads = dict[str, float](), dict[str, str](), torch.get_num_threads()

    def timed(trial: Trial) -> tuple[float, torch.Tensor]:
        ready, run = trial
        ready()
        wait_for_device(device)
        started, loss = clock(), run()
        wait_for_device(device)
        return clock() - started, loss

    torch.set_num_threads(1)
    try:
        for variant, trial in trials.items():
            try:
                first, loss = timed(trial)
                if torch.isfinite(loss):
                    seconds[str(variant)] = first
                else:
                    failed[str(variant)] = "the loss is not finite"
            except Exception as error:  # noqa: BLE001 - any error of a network without support for it
                failed[str(variant)] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        left = [(str(variant), trial) for variant, trial in trials.items() if str(variant) not in failed]
        if min(seconds.values(), default=0.0) > _MOST_S:  # the first time includes initialization
            left = left[:1]
        began = time.perf_counter()
        for number in range(_MOST_ROUNDS):
            taken_s = time.perf_counter() - began
            if number and (taken_s > _MOST_S or (number >= _LEAST_ROUNDS and taken_s > _ENOUGH_S)):
                break
            for name, trial in left:
                taken = timed(trial)[0]
                seconds[name] = min(taken, seconds.get(name, taken))
    finally:
        torch.set_num_threads(threads)
    return seconds, failed


def make_network(job: Job, sizes: dict[str, Any], device: str) -> nn.Module:
    """Creates a job's network in training mode, equal on every process. `sizes`: the result of `network_sizes`."""
    torch.manual_seed(derive_seed(job.train.seed, "model"))
    options = job.model.model_copy(update={"pretrained": False, "weights": ""})
    model = build_model(options, channels=sizes["channels"], size=sizes["size"], num_classes=sizes["classes"])
    return prepare_on_device(model, job.train, device)


@dataclass(frozen=True)
class ResolvedPrecision:
    """A job with resolved precision and memory format."""

    job: Job
    reasons: list[str] = field(default_factory=list[str])  # a sentence on each measured option
    plan_fields: dict[str, Any] = field(default_factory=dict[str, Any])  # for plan.json: values, and measured seconds
    splits: Splits | None = None  # the data, if it was opened


def resolve_precision(
    job: Job,
    folder: RunFolder,
    world: World,
    mode: str,
    objects: Objects,
    *,
    measure: bool = True,
    say: Callable[["Measurement", str], object] = lambda *_: None,
) -> ResolvedPrecision:
    """Resolves "auto" for precision and memory format. A collective.

    A resumed run keeps its values, and a run that resumes from another run's checkpoint uses that run's values.
    Otherwise, one process of each kind of machine measures once on one thread, so that the number of processes has no
    influence. Results are cached; without `measure`, only cached results are used. Before measuring, calls `say` with
    the `Measurement` and a sentence.
    """
    previous = broadcast_plain(_previous_values(folder, job) if world.is_main else None, world) or ["auto", "auto"]
    now = _with(job, *(old if new == "auto" else new for old, new in zip(previous, _measured_values(job), strict=True)))
    if not now.train.measured_precision:
        return ResolvedPrecision(now, plan_fields={"resolved": _resolved_options(job, now)})
    splits = open_splits(job, world, objects)
    measurement = Measurement(job, splits, world.device, objects, pixels_for(job, splits, objects))
    mine = MachineKind(timing_environment(world.device)["device"], has_native_bf16(world.device))
    everybody = [MachineKind(**one) for one in gather_plain(asdict(mine), world)]
    found = None
    if everybody.index(mine) == world.rank and not takes_mesh(mode):
        variants = variants_of(now.train, bf16=all(one.bf16 for one in everybody))
        found = asdict(measurement.with_times(mine, variants, functools.partial(say, measurement) if measure else None))
    kinds = [MachineKind(**one) for one in gather_plain(found, world) if one] or everybody
    taken, said = choose_variant(now.train, kinds)
    resolved = _with(job, taken.precision, taken.channels_last)
    about = {"resolved": _resolved_options(job, resolved), "precision_measured": list(map(asdict, kinds))}
    return ResolvedPrecision(resolved, said, about, splits)


def fp32_precision(job: Job) -> ResolvedPrecision:
    """Replaces "auto" by fp32 and the default memory format, for a device that this machine doesn't have."""
    plain = _with(job, EXACT if job.train.precision == "auto" else job.train.precision, job.train.channels_last is True)
    said = [f"{key} is {value}: this machine lacks the device" for key, value in _resolved_options(job, plain).items()]
    return ResolvedPrecision(plain, said)


def _measured_values(job: Job) -> list[Any]:
    return [job.train.precision, job.train.channels_last]


def _with(job: Job, precision: str, channels_last: bool | str) -> Job:
    update = {"precision": precision, "channels_last": channels_last}
    return job.model_copy(update={"train": job.train.model_copy(update=update)})


def _resolved_options(requested: Job, resolved: Job) -> dict[str, Any]:
    pairs = zip(MEASURED, _measured_values(requested), _measured_values(resolved), strict=True)
    return {key: value for key, before, value in pairs if before == "auto"}


def _previous_values(folder: RunFolder, job: Job) -> list[Any] | None:
    """Returns [precision, channels_last] ("auto": unknown) of an earlier start or the checkpoint to load, or None."""
    resume = job.checkpoint.resume
    if folder.exists() and folder.has_trained():
        precision, channels_last = (written_values(folder.job).get(key, "auto") for key in MEASURED)
        named = precision in get_args(TrainOptions.model_fields["precision"].annotation)
        return [precision if named else "auto", channels_last if isinstance(channels_last, bool) else "auto"]
    # An unreadable checkpoint is reported when the run loads it.
    with contextlib.suppress(UserError, OSError):
        if resume not in {"auto", "never"} and (path := find_checkpoint(Path(resume).expanduser(), "last")).is_dir():
            record = find_record(path, read_plain(path / STATE))
            return [record.precision, record.channels_last] if record and record.precision else None
    return None


def network_sizes(job: Job, splits: Splits, pixels: Pixels) -> dict[str, Any]:
    """Returns a dict for `make_network`: the numbers of input channels and classes, and the picture size in pixels."""
    return {"channels": pixels.channels, "size": pixels.size, "classes": len(class_names(job, splits))}


@dataclass(frozen=True)
class Measurement:
    """Times a job's network on a device, with the first samples of the data."""

    job: Job
    splits: Splits
    device: str
    objects: Objects
    pixels: Pixels

    def cache_key(self) -> str:
        """Returns the key in the cache of times: a digest of everything but the device that affects the times."""
        job, objects = self.job, self.objects
        words: list[Any] = [self.sizes, self.sample_count(), job.train.loss, job.train.label_smoothing]
        words += [job.model.model_dump(mode="json"), code_digests((job.model.name, *job.train.custom_code))]
        if isinstance(objects.model, nn.Module):
            shapes = [[name, list(one.shape), str(one.dtype)] for name, one in objects.model.named_parameters()]
            words += [str(objects.model), shapes]
        return hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def network(self) -> nn.Module:
        if (own := self.objects.model) is not None:
            return copy.deepcopy(own).to(self.device).train()
        return make_network(self.job, self.sizes, self.device)

    def make_trials(self, model: nn.Module, variants: list[Variant]) -> dict[Variant, Trial]:
        job = self.job
        group_batch_norms(model)
        data = job.data.model_copy(update={"workers": 0, "machine_workers": 0})
        plain = _with(job.model_copy(update={"data": data}), EXACT, channels_last=False)
        classes, world = self.sizes["classes"], World(device=self.device)
        loader = make_loader(plain, self.splits.train, self.pixels, world, train=True, classes=classes)
        batch = next(iter(loader.batches(0, [torch.arange(self.sample_count())])))
        loader.close()
        loss_fn = make_loss_fn(job.train, self.objects.loss)

        def trial(variant: Variant) -> Trial:
            layout = torch.channels_last if variant.channels_last else torch.contiguous_format
            probe = StepProbe(model, loss_fn, job.train.model_copy(update={"precision": variant.precision}), world)
            images = batch.images.to(memory_format=layout) if batch.images.ndim == 4 else batch.images
            part = replace(batch, images=images)

            def ready() -> None:
                model.to(memory_format=layout)  # pyright: ignore[reportCallIssue] - missing in its types
                for parameter in model.parameters():
                    parameter.grad = None

            return ready, lambda: probe.run(part).loss

        return {variant: trial(variant) for variant in variants}

    @functools.cached_property
    def sizes(self) -> dict[str, Any]:
        return network_sizes(self.job, self.splits, self.pixels)

    def sample_count(self) -> int:
        """Returns the number of samples per pass, which is independent of the number of processes."""
        most = max(_MIN, min(_MOST, _PIXELS // max(1, self.pixels.size) ** 2))
        return min(most, self.job.train.batch, len(self.splits.train), self.job.train.micro_batch or most)

    def with_times(
        self, kind: MachineKind, variants: list[Variant], say: Callable[[str], object] | None
    ) -> MachineKind:
        """Returns `kind` with the times of all variants. Measures times that aren't cached if `say` is given."""
        if len(variants) < 2:
            return kind
        times, key = OpTimes(self.device, 0.0, threads=1), self.cache_key()
        known = {str(one): times.cached(f"precision {key} {one}") for one in variants}
        if say is None or all(known.values()):
            return replace(kind, seconds={name: seconds for name, seconds in known.items() if seconds})
        try:
            with seeded_generators(derive_seed(self.job.train.seed, "precision"), self.device):
                model = self.network()
                numbers = list(model.parameters())
                if not any(one.ndim == 4 for one in numbers):  # without a convolution no layout pays, nor bf16 if small
                    small = sum(one.numel() for one in numbers) < _SMALL
                    variants = [one for one in variants if one.channels_last == variants[0].channels_last and not small]
                if len(variants) < 2:
                    return kind
                say("benchmarking the network in each precision and memory format; the results are cached")
                seconds, failed = time_variants(self.make_trials(model, variants), self.device)
        except Exception:  # noqa: BLE001 - errors of the network or the data are reported when they are built
            return kind
        for name, one in seconds.items():
            times.store(f"precision {key} {name}", one)
        times.save()
        return replace(kind, seconds=seconds, failed=failed)
