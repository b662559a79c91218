"""Resolves precision and layout of a job once in a run, the same for any number of processes."""

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from manyhands.checkpoint import files
from manyhands.checkpoint.files import read_plain
from manyhands.checkpoint.folders import resolve
from manyhands.checkpoint.trained import find_record
from manyhands.config.job import MEASURED, Job, TrainOptions
from manyhands.config.load import written_values
from manyhands.core.devices import computes_bf16
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.seeds import derive
from manyhands.core.user_code import code_digests
from manyhands.core.world import World
from manyhands.data.splits import Splits
from manyhands.data.transforms import Batch, Pixels
from manyhands.parallel.apply import takes_mesh
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.group.plain import broadcast_plain, gather_plain
from manyhands.parallel.network import ParallelNetwork, full_batch
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.planner.precision import (
    EXACT,
    KindOfMachine,
    PrecisionRequest,
    Trial,
    Variant,
    choose_variant,
    time_variants,
)
from manyhands.planner.timing import OpTimes, environment
from manyhands.train.data_setup import class_names, make_loader, open_splits, pixels_for
from manyhands.train.draws import drawing
from manyhands.train.loss import make_loss_fn
from manyhands.train.objects import Objects
from manyhands.worker.plan_trials import make_network

# A measured pass has as many samples as make so many pixels, within these limits: 16 of CIFAR-10, 4 of ImageNet. With
# more of them bf16 and channels_last gain more, so what is taken pays in training too.
_PIXELS, _MIN, _MOST = 16 * 32 * 32, 4, 64
# A network without a convolution gains nothing by bf16 below so many numbers.
_SMALL = 1_000_000


@dataclass(frozen=True)
class ResolvedPrecision:
    """A job with resolved precision and layout."""

    job: Job  # with a precision and a layout
    said: list[str] = field(default_factory=list[str])  # a sentence on each that was measured
    # for plan.json: what of the job this decided, and each kind of machine's seconds
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    splits: Splits | None = None  # the data, where it had to be opened


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
    """Resolves "auto" for precision and layout; a collective.

    A resumed run keeps its values, and a run that resumes from another run's checkpoint uses that run's values.
    Otherwise, each kind of machine is measured once with one process on one thread, so that the number of processes
    has no influence; results are cached.

    Args:
        job: as the user has it.
        folder: the run folder.
        world: the processes.
        mode: the parallel mode.
        objects: the Python objects of the user.
        measure: False to use only cached measurements.
        say: called with the measurement and a sentence before a measurement.
    """
    previous = broadcast_plain(_previous(folder, job) if world.is_main else None, world) or ["auto", "auto"]
    now = _with(job, *(old if new == "auto" else new for old, new in zip(previous, _values(job), strict=True)))
    if not now.train.measured_precision:
        return ResolvedPrecision(now, about={"resolved": _resolved(job, now)})
    requested = PrecisionRequest(now.train.precision, now.train.channels_last)
    splits = open_splits(job, world, objects)
    measurement = Measurement(job, splits, world.device, objects, pixels_for(job, splits, objects))
    mine = KindOfMachine(environment(world.device)["device"], computes_bf16(world.device))
    everybody = [KindOfMachine(**one) for one in gather_plain(mine.as_plain(), world)]
    found = None
    if everybody.index(mine) == world.rank and not takes_mesh(mode):
        variants = requested.variants(bf16=all(one.bf16 for one in everybody))
        announce = functools.partial(say, measurement) if measure else None
        found = measured(measurement, mine, variants, announce).as_plain()
    kinds = [KindOfMachine(**one) for one in gather_plain(found, world) if one] or everybody
    taken, said = choose_variant(requested, kinds)
    resolved = _with(job, taken.precision, taken.channels_last)
    about = {"resolved": _resolved(job, resolved), "precision_measured": [kind.as_plain() for kind in kinds]}
    return ResolvedPrecision(resolved, said, about, splits)


def plain_precision(job: Job) -> ResolvedPrecision:
    """Returns the job in fp32 and the default layout if they are "auto", for a device that is not on this machine."""
    plain = [EXACT if job.train.precision == "auto" else job.train.precision, job.train.channels_last is True]
    said = [f"{key} is {value}: no device to measure" for key, value in _resolved(job, _with(job, *plain)).items()]
    return ResolvedPrecision(_with(job, *plain), said)


def _values(job: Job) -> list[Any]:
    return [job.train.precision, job.train.channels_last]


def _with(job: Job, precision: str, channels_last: bool | str) -> Job:
    update = {"precision": precision, "channels_last": channels_last}
    return job.model_copy(update={"train": job.train.model_copy(update=update)})


def _resolved(asked: Job, resolved: Job) -> dict[str, Any]:
    pairs = zip(MEASURED, _values(asked), _values(resolved), strict=True)
    return {key: value for key, before, value in pairs if before == "auto"}


def _previous(folder: RunFolder, job: Job) -> list[Any] | None:
    """Returns precision and layout of an earlier start or of a checkpoint; "auto" if unknown."""
    if not folder.exists() or not folder.has_trained():
        return _kept_by(job.checkpoint.resume)
    written = written_values(folder.job)
    known = TrainOptions.model_fields
    precision, channels_last = (written.get(key, "auto") for key in MEASURED)
    named = precision in get_args(known["precision"].annotation)
    return [precision if named else "auto", channels_last if isinstance(channels_last, bool) else "auto"]


def _kept_by(resume: str) -> list[Any] | None:
    """Those of the run whose checkpoint this one goes on from; what is wrong with that is said where it is read."""
    if resume in {"auto", "never"}:
        return None
    with contextlib.suppress(UserError, OSError):
        path = resolve(Path(resume).expanduser(), "last")
        record = find_record(path, read_plain(path / files.STATE)) if path.is_dir() else None
        return [record.precision, record.channels_last] if record and record.precision else None
    return None


@dataclass(frozen=True)
class Measurement:
    """The measured case: a job's network on a device, with the first samples of its data."""

    job: Job
    splits: Splits
    device: str
    objects: Objects
    pixels: Pixels

    def key(self) -> str:
        """Returns the cache key: everything that affects the seconds except the kind of machine."""
        job, objects = self.job, self.objects
        words: list[Any] = [self.facts(), self.count(), job.train.loss, job.train.label_smoothing]
        words += [job.model.model_dump(mode="json"), code_digests((job.model.name, *job.train.custom_code))]
        if isinstance(objects.model, nn.Module):
            shapes = [[name, list(one.shape), str(one.dtype)] for name, one in objects.model.named_parameters()]
            words += [str(objects.model), shapes]
        return hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def network(self) -> nn.Module:
        """Returns a copy of the network."""
        own = self.objects.model
        if own is not None:
            return copy.deepcopy(own).to(self.device).train()
        return make_network(self.job, self.facts(), self.device)

    def trials(self, model: nn.Module, variants: list[Variant]) -> dict[Variant, Trial]:
        """Returns the trials of all variants, on one network."""
        job = self.job
        group_batch_norms(model)
        batch, world = self.batch(self.count()), World(device=self.device)
        loss_fn, network = make_loss_fn(job.train, self.objects.loss), ParallelNetwork(model)

        def trial(variant: Variant) -> Trial:
            layout = torch.channels_last if variant.channels_last else torch.contiguous_format
            gradients = Gradients(network, world, loss_fn, precision=variant.precision)
            images = batch.images.to(memory_format=layout) if batch.images.ndim == 4 else batch.images
            part = full_batch(images, batch.labels)

            def ready() -> None:
                model.to(memory_format=layout)  # pyright: ignore[reportCallIssue] - missing in its types
                for parameter in model.parameters():
                    parameter.grad = None

            return Trial(ready, lambda: gradients.forward_backward(part, len(batch.labels)).loss)

        return {variant: trial(variant) for variant in variants}

    def batch(self, count: int) -> Batch:
        """Returns the first samples in single precision."""
        data = self.job.data.model_copy(update={"workers": 0, "machine_workers": 0})
        plain = _with(self.job.model_copy(update={"data": data}), EXACT, channels_last=False)
        classes, world = self.facts()["classes"], World(device=self.device)
        loader = make_loader(plain, self.splits.train, self.pixels, world, train=True, classes=classes)
        found = next(iter(loader.batches(0, [torch.arange(count)])))
        loader.close()
        return found

    def facts(self) -> dict[str, Any]:
        classes = len(class_names(self.job, self.splits))
        return {"channels": self.pixels.channels, "size": self.pixels.size, "classes": classes}

    def count(self) -> int:
        """Returns the number of samples of a pass, which is independent of the number of processes."""
        most = max(_MIN, min(_MOST, _PIXELS // max(1, self.pixels.size) ** 2))
        return min(most, self.job.train.batch, len(self.splits.train), self.job.train.micro_batch or most)


def measured(
    measurement: Measurement,
    kind: KindOfMachine,
    variants: list[Variant],
    say: Callable[[str], object] | None,
) -> KindOfMachine:
    """Returns a kind of machine with the seconds of all variants, cached or, with `say`, measured now."""
    if len(variants) < 2:
        return kind
    times, key = times_of_one_thread(measurement.device), measurement.key()
    known = {str(one): times.cached(f"precision {key} {one}") for one in variants}
    if say is None or all(known.values()):
        return replace(kind, seconds={name: seconds for name, seconds in known.items() if seconds})
    device = measurement.device
    try:
        with drawing(derive(measurement.job.train.seed, "precision"), device.partition(":")[0]):
            model = measurement.network()
            variants = _worth_timing(model, variants)
            if len(variants) < 2:
                return kind
            say("benchmarking the network in each precision and layout; the results are cached")
            seconds, failed = time_variants(measurement.trials(model, variants), device)
    except Exception:  # noqa: BLE001 - what is wrong with network or data is said where they are built
        return kind
    for name, one in seconds.items():
        times.keep(f"precision {key} {name}", one)
    times.save()
    return replace(kind, seconds=seconds, failed=failed)


def _worth_timing(model: nn.Module, variants: list[Variant]) -> list[Variant]:
    """Without the layout where the network has no convolution, and none where it is small besides."""
    numbers = list(model.parameters())
    if any(one.ndim == 4 for one in numbers):
        return variants
    small = sum(one.numel() for one in numbers) < _SMALL
    return [] if small else [one for one in variants if one.channels_last == variants[0].channels_last]


def times_of_one_thread(device: str) -> OpTimes:
    """What is kept is of one thread, as it is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return OpTimes(device, 0.0)
    finally:
        torch.set_num_threads(threads)
