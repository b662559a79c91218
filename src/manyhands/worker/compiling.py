"""Has processes settle whether a job compiles that leaves it open: once in a run, alike, whatever their number."""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manyhands.cluster.doctor.facts.software import has_compiler
from manyhands.config.load import written_values
from manyhands.core.folder import RunFolder
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.scratch import scratch
from manyhands.core.world import World
from manyhands.parallel.options import MODE_ALONE, USUAL_MODE
from manyhands.parallel.plain import broadcast_plain, gather_plain
from manyhands.planner.compiling import KindOfCompiler, choose_compile, could_pay
from manyhands.planner.op_times import environment
from manyhands.planner.precision import KindOfMachine, Variant
from manyhands.train.compiled import keep_compiled
from manyhands.train.data_setup import open_splits, pixels_for
from manyhands.train.objects import Objects
from manyhands.train.optimize import steps_to_make
from manyhands.worker.precision import Measurement, SettledPrecision, measured, times_of_one_thread

# With fewer samples than this over the whole run no network is looked at.
_FEWEST = 100_000
# A card is timed with as many samples as it is usually given, a processor with as many as the precisions were.
_ON_CARD = 128
_LONGEST_S = 240.0


def settle_compile(
    settled: SettledPrecision,
    folder: RunFolder,
    world: World,
    mode: str,
    objects: Objects,
    *,
    say: Callable[[str], object] = lambda _: None,
) -> SettledPrecision:
    """What became of the job, with what its "auto" for compiling becomes; a collective.

    `settled` is with a precision and a layout. A run that has trained, as its folder says, keeps what it has. Under
    most modes nothing is compiled unasked. `say` is told before something is timed here.
    """
    job = settled.job
    if job.train.compile != "auto":
        return settled
    kept = broadcast_plain(_kept(folder) if world.is_main else None, world)
    if kept is not None or mode not in {USUAL_MODE, MODE_ALONE}:
        return _with(settled, bool(kept))
    splits = settled.splits or open_splits(job, world, objects)
    settled = replace(settled, splits=splits)
    samples = steps_to_make(job.train, len(splits.train)) * min(job.train.batch, len(splits.train))
    if samples < _FEWEST:
        return _with(settled, False)
    mine = environment(world.device)["device"]
    found = None
    if gather_plain(mine, world).index(mine) == world.rank:
        measurement = Measurement(job, splits, world.device, objects, pixels_for(job, splits, objects))
        limit_s = min(_LONGEST_S, job.cluster.collective_timeout_s / 2)
        found = _looked_at(measurement, KindOfCompiler(mine), samples, limit_s, say).as_plain()
    kinds = [KindOfCompiler(**one) for one in gather_plain(found, world) if one]
    compiles, said = choose_compile(kinds, samples)
    about = {"compile_measured": [kind.as_plain() for kind in kinds]} if said else {}
    told = replace(settled, said=[*settled.said, *filter(None, [said])], about={**settled.about, **about})
    return _with(told, compiles)


def _kept(folder: RunFolder) -> bool | None:
    """What a run that has trained did."""
    if not folder.exists() or not folder.has_trained():
        return None
    return written_values(folder.job).get("train.compile") is True


def _with(settled: SettledPrecision, compiles: bool) -> SettledPrecision:
    train = settled.job.train.model_copy(update={"compile": compiles})
    about = {**settled.about, "resolved": {**settled.about.get("resolved", {}), "train.compile": compiles}}
    return replace(settled, job=settled.job.model_copy(update={"train": train}), about=about)


def _looked_at(
    measurement: Measurement, kind: KindOfCompiler, samples: int, limit_s: float, say: Callable[[str], object]
) -> KindOfCompiler:
    """What is known of compiling on this machine: what is kept, or measured now where that could pay."""
    job, device = measurement.job, measurement.device
    variant = Variant(job.train.precision, job.train.channels_last is True)
    machine = measured(measurement, KindOfMachine(kind.name, bf16=False), [variant], say, fewest=1)
    plain_s = machine.seconds.get(str(variant), 0.0) / measurement.count()
    if not could_pay(plain_s, samples) or not has_compiler():
        return replace(kind, plain_s=plain_s)
    most = job.train.micro_batch or _ON_CARD
    on_card = min(_ON_CARD, most, job.train.batch, len(measurement.splits.train))
    count = measurement.count() if device == "cpu" else on_card
    words = [f"compile {measurement.key()} {count} {variant} {word}" for word in ("plain", "compiled", "making")]
    times = times_of_one_thread(device)
    known = [times.kept(word) for word in words]
    if None in known:
        say("compiling this network once, to see what that gains; takes a minute, and is kept")
        told = _tried(measurement, count, limit_s)
        if refused := told.get("refused"):
            kind = replace(kind, refused=f"the network can't be compiled ({refused})")
        known = [told.get(word, 0.0) / count for word in ("plain", "compiled")] + [told.get("making", 0.0)]
        for word, seconds in zip(words, known, strict=True):
            times.keep(word, seconds)
        times.save()
    plain_s, compiled_s, making_s = (seconds or 0.0 for seconds in known)
    refused = kind.refused or ("" if compiled_s else "the network couldn't be compiled when it was last tried")
    return replace(kind, plain_s=plain_s, compiled_s=compiled_s, making_s=making_s, refused=refused)


def _tried(measurement: Measurement, count: int, limit_s: float) -> dict[str, Any]:
    """What `compile_trial` says, in a process of its own, which may take all the memory or never end."""
    import cloudpickle

    own, nowhere = measurement.objects.model, subprocess.DEVNULL
    try:
        keep_compiled()
        given = {
            "job": measurement.job.model_dump(mode="json"),
            "facts": measurement.facts(),
            "device": measurement.device,
            "model": None if own is None else copy.deepcopy(own).cpu(),
            "images": measurement.batch(count).images.cpu(),
        }
        pickled = cloudpickle.dumps(sys.path) + cloudpickle.dumps(given)
    except Exception as error:  # noqa: BLE001 - of the user's network; where that is wrong it is said where it is built
        return {"refused": f"{type(error).__name__}: {error}".partition("\n")[0]}
    with scratch("objects") as folder:
        path, out = folder / "given", folder / "found"
        path.write_bytes(pickled)
        command = [sys.executable, "-P", "-m", "manyhands.worker.compile_trial", str(path), str(out)]
        # It ends where its standard input does, so with this process.
        trial = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
        try:
            code = trial.wait(limit_s)
            return {"refused": f"it ended with {code}"} if code else parse_json(read_bytes(out))
        except subprocess.TimeoutExpired:
            return {"refused": f"that takes longer than {limit_s:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(trial.pid, signal.SIGKILL)
            trial.communicate()
