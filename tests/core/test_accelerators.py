"""What is used of an accelerator depends on what torch says of it and on whether its type is tested, not on its name.

Each case runs in a fork in which torch finds two devices of a type; what is on them stays in this machine's memory.
"""

import contextlib
import importlib.util
import io
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manyhands.cluster.doctor import accelerators
from manyhands.core import devices
from manyhands.core.errors import UserError
from manyhands.core.machine import cpu_model
from manyhands.core.world import ProcessInfo, World
from manyhands.data import loading
from manyhands.data.loading import open_loader
from manyhands.data.order import BatchSharing
from manyhands.data.splits import ImagesInMemory, UserSamples
from manyhands.data.transforms import Pixels
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.group import join as group
from manyhands.parallel.modes import dataparallel
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.planner.timing import timing_environment
from manyhands.train import shares

TYPES = ["cuda", "npu", "xpu"]
HELD, RESERVED, FREE = 3000, 2000, 4000
PIXELS = Pixels(8, 1, (0.5,), (0.25,), "crop-flip")
IMAGES = torch.randint(0, 256, (12, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 5
REQUESTS = [[3, 1, 2], [0], [11, 3], [5, 4, 6, 7, 8]]


def record_copies(kind):
    """The copies to a device of this type from now on: whether each came from pinned memory, and without waiting."""
    made, to, empty = [], torch.Tensor.to, torch.empty

    def to_device(values, *arguments, **named):
        if arguments and torch.device(kind).type == getattr(arguments[0], "type", ""):
            made.append((values.is_pinned(), named.get("non_blocking", False)))
            return to(values.clone(), *arguments[1:])
        return to(values, *arguments, **named)

    def pinned(values, device=None):
        values = values.clone()
        values.pinned = True
        return values

    torch.Tensor.to, torch.Tensor.pin_memory = to_device, pinned
    torch.Tensor.is_pinned = lambda values: getattr(values, "pinned", False)
    torch.empty = lambda *shape, pin_memory=False, **named: (
        pinned(empty(*shape, **named)) if pin_memory else empty(*shape, **named)
    )
    return made


def become(kind, tested, cards=2):
    """Has torch find devices of a type, as its own functions and the type's module say it."""
    module = SimpleNamespace(
        is_available=lambda: cards > 0, device_count=lambda: cards, current_device=lambda: 0,
        _is_in_bad_fork=lambda: False, get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_device_name=lambda device: f"card of {kind}", get_device_properties=lambda device: SimpleNamespace(
            total_memory=1, multi_processor_count=1
        ),
        max_memory_allocated=lambda device: HELD, memory_reserved=lambda device: RESERVED,
        mem_get_info=lambda device: (FREE, 2 * FREE), is_bf16_supported=lambda: True,
    )  # fmt: skip
    if kind == "cuda":
        module.is_bf16_supported = lambda including_emulation=True: including_emulation
    if kind == "npu":
        torch.utils.rename_privateuse1_backend(kind)
        torch._register_device_module(kind, module)
    else:
        vars(torch.get_device_module(kind)).update(vars(module))
    found = torch.device(kind)
    torch.accelerator.current_accelerator = lambda check_available=False: (
        found if cards or not check_available else None
    )
    torch.accelerator.device_count = module.device_count
    torch.accelerator.is_available = module.is_available
    devices.TESTED_DEVICES = (kind,) if tested else ()


def on(kind, function, *arguments, tested=False, cards=2):
    """Calls a function in a fork of this process, for which this machine has such devices; returns its result."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, become, (kind, tested, cards)) as executor:
        return executor.submit(function, kind, *arguments).result(60)


def _meaning(kind):
    place = ProcessInfo(rank=1, size=2, local_rank=1, local_size=2)
    chosen = []
    torch.accelerator.set_device_index = chosen.append
    group._set_current_device(group._choose_device(place))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(accelerators._TORCH_SCRIPT, {})
    with pytest.raises(UserError, match=f"there is no {kind}:2: this machine has 2 {kind}"):
        devices.require_device(f"{kind}:2")
    return {
        "accelerator": devices.accelerator() == kind,
        "each process its own": chosen == [f"{kind}:1"],
        "the second alone": group._choose_device(ProcessInfo(device="auto:1")) == f"{kind}:1",
        "bf16": devices.has_native_bf16(kind),
        "what the doctor counts": json.loads(out.getvalue().partition(" ")[2])["count"],
    }


def _figures(kind):
    device = f"{kind}:0"
    world = World(0, 2, 0, 2, device)
    feed = SimpleNamespace(order=SimpleNamespace(batch=100), sharing=SimpleNamespace(micro_batch=0))
    model = nn.BatchNorm1d(3)
    gradients = Gradients(ParallelNetwork(model), world, precision="fp16")
    unscaled = Gradients(ParallelNetwork(model), world, precision="bf16")
    alone = World(device=device)
    return {
        "most samples": shares._samples_that_fit(SimpleNamespace(world=world, feed=feed)),
        "name": devices.device_name(device) == f"card of {kind}",
        "known by its name": timing_environment(device)["device"] == f"{kind} card of {kind}",
        "scaler": gradients.scaler._device == kind,
        "autocast": torch.device(unscaled.autocast().device).type == kind,
        "skips": unscaled.optimizer_skips_nonfinite(SimpleNamespace(_step_supports_amp_scaling=True)),
        "one process for all": type(dataparallel.apply(model, alone, ModeRequest()).call) is nn.DataParallel,
    }


class On(torch.Tensor):
    """A tensor that says it is elsewhere."""

    kind = "cpu"
    device = property(lambda self: torch.device(self.kind))


def _beyond_defaults(kind):
    """What isn't torch's own default: a data set on the device, several BatchNorm groups in one pass."""
    On.kind = kind
    copies = record_copies(kind)
    resident = loading._on_device(IMAGES[:4], torch.device(kind)), len(copies)
    assert loading._on_device(torch.zeros(FREE // 2 + 1, dtype=torch.uint8), torch.device(kind)) is not None
    too_large = len(copies) - resident[1]
    groups, _ = group_batch_norms(nn.BatchNorm1d(3).train())
    share = BatchSharing(1, 0, 4).micro_batches(16)[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, 16, 16)
    runs = groups.layers[0]._select_runs(torch.ones(16, 3).as_subclass(On))
    return {"resident": resident[1], "resident though too large": too_large, "passes": len(runs)}


def _served(kind, name, workers):
    """Batches of a source, and how its pictures and labels came to the device."""
    loading._on_device = lambda images, device: images  # as if it were too large
    copies = record_copies(kind)
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda index: None
    loader = open_loader(SOURCES[name], PIXELS, train=True, seed=5, device=kind, workers=workers)
    copies.clear()  # what normalizing needs
    batches = list(loader.batches(1, map(torch.tensor, REQUESTS)))
    loader.close()
    found = [(batch.images.tolist(), batch.labels.tolist(), batch.samples.tolist()) for batch in batches]
    return found, copies


def _without_cards(kind):
    """`current_accelerator()` names the type that torch was built for, with a device or without."""
    with pytest.raises(UserError, match="this machine has no accelerator"):
        group._choose_device(ProcessInfo(device="auto:1"))
    found = torch.accelerator.current_accelerator()
    return found.type, devices.accelerator(), group._choose_device(ProcessInfo())


@pytest.mark.parametrize("kind", TYPES)
def test_devices_are_found_and_given_out_and_without_one_the_processor_computes(kind):
    wanted = {"accelerator": True, "each process its own": True, "the second alone": True, "what the doctor counts": 2}
    # A type emulates bf16 or has it.
    assert on(kind, _meaning) == {**wanted, "bf16": kind != "cuda"}
    assert on(kind, _without_cards, cards=0) == (kind, "cpu", "cpu")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tested", [False, True])
def test_memory_and_precision_are_on_everywhere_and_what_is_not_torchs_default_once_a_type_is_tested(kind, tested):
    wanted = {"resident": int(tested), "resident though too large": 0, "passes": 1 if tested else 4}
    assert on(kind, _beyond_defaults, tested=tested) == wanted
    found = on(kind, _figures, tested=tested)
    # Of what is free with what torch has in reserve, half may go to more than an equal share of 50.
    assert found.pop("most samples") == 50 + 50 * (FREE + RESERVED - HELD) // (2 * HELD)
    assert found == dict.fromkeys(found, True)


SOURCES = {
    "a set in memory": ImagesInMemory(IMAGES, LABELS),
    "samples that are made": UserSamples(list(zip(IMAGES.float(), LABELS.tolist(), strict=True))),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("name", "workers"), [("a set in memory", 0), ("samples that are made", 0), ("samples that are made", 2)]
)
def test_batches_are_served_through_pinned_memory(kind, name, workers):
    plain = open_loader(SOURCES[name], PIXELS, train=True, seed=5).batches(1, map(torch.tensor, REQUESTS))
    served, copied = on(kind, _served, name, workers)
    assert served == [(one.images.tolist(), one.labels.tolist(), one.samples.tolist()) for one in plain]
    assert {*copied} == {(True, True)}


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_processor_and_apples_gpu_are_no_accelerators_of_ours(kind, monkeypatch):
    monkeypatch.setattr(devices, "TESTED_DEVICES", (kind,))
    assert not devices.is_accelerator(kind)
    assert not devices.is_tested_accelerator(kind)
    assert devices.device_name(kind) == cpu_model().name
    assert loading._on_device(IMAGES, torch.device(kind)) is IMAGES
    assert not Gradients(ParallelNetwork(nn.ReLU()), World(device=kind)).on_card


def test_types_that_have_passed_and_those_of_a_variable_are_tested(monkeypatch):
    assert devices._PASSED == ("cuda",)
    assert not devices.is_tested_accelerator("xpu")
    monkeypatch.setenv("MANYHANDS_TESTED_DEVICES", "xpu,cpu")
    spec = importlib.util.spec_from_file_location("devices_again", devices.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert [kind for kind in ("cuda", "xpu", "cpu") if again.is_tested_accelerator(kind)] == ["cuda", "xpu"]


@pytest.mark.parametrize(
    ("found", "wanted", "processes", "meant"),
    [
        (None, "auto", 2, "cpu"),
        ("cuda", "auto", 2, "cuda"),
        ("cuda", "cpu", 2, "cpu"),
        ("mps", "auto", 1, "mps"),
        ("mps", "auto", 2, "cpu"),
        ("mps", "mps", 2, "mps"),
        ("npu", "auto:1", 1, "npu:1"),
        (None, "auto:1", 1, "auto:1"),
    ],
)
def test_a_job_s_word_for_a_device(monkeypatch, found, wanted, processes, meant):
    answer = found and SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: answer)
    assert devices.resolve_device_type(wanted, processes) == meant
