"""What must hold on an accelerator. Each function takes a device, and gives figures or fails; see `__main__.py`.

Nothing here needs pytest: the machines that have a card may lack it.
"""

import functools
import json
import signal
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from manyhands import session
from manyhands.core.errors import RunError
from manyhands.core.world import World
from manyhands.data.order import BatchSharing
from manyhands.parallel.replicas import batch_norm as norm
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.planner.timing import time_function
from manyhands.train.loop import fit
from manyhands.worker.failure import explain_out_of_memory
from tests.data.sets import make
from tests.e2e import command
from tests.gpu.case import Skip, Unproven
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built, captured, normed, train

QUIET = ["--set", "run.report=false"]
TIGHT = 1e-9
FP64 = {"train.precision": "fp64", "train.norm_group": 4}


def _ranks(function, size, *arguments, device, backend="gloo"):
    # A process that has used a card can't be forked.
    start = "fork" if device == "cpu" else "spawn"
    return run_on_ranks(function, size, *arguments, start=start, device=device, backend=backend)


def _worst(got, wanted):
    """The largest difference of a tensor, relative to its largest value."""
    worst = 0.0
    for name, tensor in wanted.items():
        scale = max(tensor.abs().max().item(), 1e-12) if tensor.is_floating_point() else 1
        worst = max(worst, (got[name].double() - tensor.double()).abs().max().item() / scale)
    return worst


def _within(value, limit, name=""):
    assert value <= limit, (name, value)
    return value


def _accelerator(device):
    if device == "cpu":
        raise Skip("needs an accelerator")


def _accuracy(folder):
    return max(row["top1"] for row in command.metrics(folder, "evaluation"))


def _train(device, *more, data=("digits", "cnn"), out="run", **others):
    """The best accuracy of a run by the command."""
    words = ["train", *data, "--device", device, "--out", out, *QUIET, *more]
    command.done(words, by=command.start, **others)
    return _accuracy(out)


def trains_and_evaluates(device):
    began = time.monotonic()
    accuracy = _train(device, "--epochs", 3)
    first = command.events("run", "first-step")[0]["time"] - command.events("run", "started")[0]["time"]
    assert command.events("run", "started")[0]["data"]["device"] == device
    seconds = time.monotonic() - began
    # As on a device that hasn't been tested.
    untested = _train(device, "--epochs", 3, out="defaults", MANYHANDS_TESTED_DEVICES="")
    assert min(accuracy, untested) > 0.8, (accuracy, untested)
    return {"top1": accuracy, "top1 by torch's defaults": untested, "seconds": seconds, "first_step_s": first}


def _law(device, size, settings, limit, mode="data", backend="gloo", updates=10):
    first = device if device == "cpu" or ":" in device else f"{device}:0"
    alone = run_on_ranks(train, 1, updates, normed, settings, device=first)
    settings = {**settings, "parallel.mode": mode}
    several = _ranks(train, size, updates, normed, settings, device=device, backend=backend)
    # Rank 0 alone gathers a sharded network.
    reported = several if mode != "fsdp" else several[:1]
    assert all(torch.equal(alone[0].evaluation[0], one.evaluation[0]) for one in several), "evaluations differ"
    return _within(max(_worst(one.model, alone[0].model) for one in reported), limit)


def two_processes_make_the_updates_of_one(device):
    cases = {
        "fp64": {},
        "fp64, accumulated": {"train.micro_batch": 4},
        "fp64, groups across processes": {"train.norm_group": 16},
        "fp64, adamw": {"train.optimizer": "adamw", "train.lr": 0.002},
        "fp64, clipped, channels_last": {"train.clip": 0.1, "train.channels_last": True},
    }
    return {name: _law(device, 2, {**FP64, **settings}, TIGHT, updates=5) for name, settings in cases.items()}


def the_card_computes_what_the_processor_does(device):
    _accelerator(device)
    found = {}
    for name, limit, settings in (
        ("fp64", TIGHT, FP64),
        ("fp64, channels_last", TIGHT, {**FP64, "train.channels_last": True}),
        ("fp64, adamw", TIGHT, {**FP64, "train.optimizer": "adamw", "train.lr": 0.002}),
        ("fp32, one update", 5e-3, {"train.precision": "fp32", "train.norm_group": 4}),  # convolutions take tf32
    ):
        updates = 1 if "one" in name else 10
        here, there = (train(World(device=one), updates, normed, settings) for one in (device, "cpu"))
        found[name] = _within(_worst(here.model, there.model), limit, name)
        if "fp64" in name:
            assert torch.equal(here.evaluation[0], there.evaluation[0]), f"{name}: evaluations differ"
    return found


class BadOnce(nn.Module):
    """Gives its first layers an infinite gradient in one call of training, on the last rank alone."""

    def __init__(self, call):
        super().__init__()
        self.inner, self.call, self.calls = normed(), call, 0

    def forward(self, images):
        self.calls += self.training
        output = self.inner(images)
        mine = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if mine and self.training and self.calls == self.call:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


def _trainer(world, make, folder="", **settings):
    """A trainer of a network that `make` makes, on synthetic pictures unless the settings say otherwise."""
    torch.manual_seed(3)
    flags = {
        "data.name": "synthetic:120x1x8x8x5", "train.batch": 30, "train.epochs": 4, "train.lr": 0.05,
        "model.num_classes": 5, "checkpoint.every": "never", "run.report": False, "run.log_every_s": 0.01,
        "train.norm_group": 15, **settings,
    }  # fmt: skip
    return built(world, make(), flags, folder)


def _weights(trainer):
    return {name: tensor.cpu() for name, tensor in captured(trainer).model.items()}


def _overflow(world):
    with _trainer(world, lambda: BadOnce(call=4), **{"train.precision": "fp16"}) as trainer:
        model = trainer.network.model
        before, scales = None, []
        for number, update in enumerate(trainer.feed.updates(0, 0)):
            skipped, before = model.calls == model.call - 1, _weights(trainer)
            trainer.updater(update, number)
            scales.append(trainer.updater.gradients.scaler.get_scale())
            if skipped:
                after = _weights(trainer)
                kept = all(torch.equal(after[name], one) for name, one in before.items() if "running" not in name
                           and "tracked" not in name)  # fmt: skip
                return kept, scales, after
    raise AssertionError(f"the bad call never came: {model.calls}")


def fp16_skips_alike_and_goes_on(device):
    found = {}
    for size in (1, 2):
        every = _ranks(_overflow, size, device=device)
        for kept, scales, _ in every:
            assert kept, "the update was made"
            assert scales[-1] < scales[0], scales
        assert _worst(every[0][2], every[-1][2]) == 0, "processes differ"
        found[f"scale after, of {size}"] = every[0][1][-1]
    return found


def _refused(world):
    settings, reported = {"train.precision": "fp32", "train.stop_after_bad": 1}, ""
    with _trainer(world, lambda: BadOnce(call=9), **settings) as trainer:
        try:
            fit(trainer)
        except RunError as error:
            reported = str(error)
        weights = {name: one.detach().cpu() for name, one in trainer.network.model.named_parameters()}
        return reported, weights


def a_bad_gradient_spoils_no_weight(device):
    for size in (1, 2):
        every = _ranks(_refused, size, device=device)
        for reported, weights in every:
            assert "not finite" in reported, reported
            assert all(bool(torch.isfinite(one).all()) for one in weights.values()), "weights are spoiled"
        assert _worst(every[0][1], every[-1][1]) == 0, "processes differ"
    return {}


def half_precisions_learn(device):
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        settings = {"train.precision": precision, "data.name": "digits", "train.epochs": 2, "model.num_classes": 10}
        with _trainer(World(device=device), network_of_digits, **settings) as trainer:
            fit(trainer)
            found[precision] = trainer.evaluate().top1
    assert all(one > 0.75 for one in found.values()), found
    return found


def network_of_digits():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
    )


class Wasteful(nn.Module):
    """Takes 64 MiB for each picture."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 5)

    def forward(self, images):
        room = torch.empty(len(images), 16 << 20, device=images.device) if len(images) > 2 else None
        output = self.inner(images.flatten(1))
        del room
        return output


def out_of_memory_says_what_fits(device):
    _accelerator(device)
    module = torch.get_device_module(device)
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(min(1.0, (1 << 30) / total), device)
    settings = {"train.batch": 32, "train.norm_group": "local"}
    with _trainer(World(device=device), Wasteful, **settings) as trainer:
        try:
            fit(trainer)
        except torch.OutOfMemoryError as error:
            hints = explain_out_of_memory(error, trainer).hints
        else:
            raise AssertionError("it fitted")
        assert "train.micro_batch=8" in hints[0], hints
    return {"advice": hints[0]}


def _part(world, folder, steps, **settings):
    settings = {"train.max_steps": steps, "checkpoint.every": "7steps", **settings}
    with _trainer(world, normed, folder, **settings) as trainer:
        fit(trainer)
        return _weights(trainer)


def goes_on_to_the_same_bits(device):
    for settings in ({}, {"train.optimizer": "adamw", "train.lr": 0.002}, {"train.precision": "fp16"}):
        same, broken = {"train.deterministic": True, **settings}, tempfile.mkdtemp()
        wanted = _part(World(device=device), "", 11, **same)
        _part(World(device=device), broken, 7, **same)
        got = _part(World(device=device), broken, 11, **same)
        assert _worst(got, wanted) == 0, (settings, _worst(got, wanted))
    return {}


def _own_backend(device):
    return dist.get_default_backend_for_device(device)


def nccl_with_one_process(device):
    _accelerator(device)
    met = f"tcp://127.0.0.1:{command.free_port()}"
    own = ["--backend", _own_backend(device)]
    top1 = _train(device, "--epochs", 1, "--init", met, "--world-size", 1, "--rank", 0, *own)
    assert command.events("run", "started")[0]["data"]["backend"] == own[1]
    return {"top1": top1}


def _on_two(device):
    """A command's words for two processes that share a device."""
    return ["-n", 2, "--backend", "gloo" if device == "cpu" or ":" in device else _own_backend(device)]


def a_peers_death_is_heard(device):
    began = time.monotonic()
    ended = _killed(device, "--epochs", 50, "--elastic", "off")
    assert ended.code, "nobody minded"
    assert "SIGKILL" in ended.err or "killed" in ended.err, ended.err[-2000:]
    return {"seconds": time.monotonic() - began}


def _killed(device, *more):
    """Trains on two processes, of which one is killed in its ninth pass or so."""
    marker = str(Path("marker").absolute())
    words = ["train", "digits", f"{command.NETS}:Killed", "--device", device, *_on_two(device), "--out", "run", *QUIET]
    words += ["--set", "train.precision=fp32", *more]
    return command.finish(command.start(*words, FAULT_MARKER=marker, FAULT_CALL="9"))


def a_killed_process_is_replaced(device):
    ended = _killed(device, "--epochs", 3)
    assert ended.code == 0, ended.err[-3000:]
    (again,), (resumed,) = command.events("run", "restarted"), command.events("run", "resumed")
    assert resumed["step"] == again["step"] > 0, (again, resumed)
    return {"step": resumed["step"], "top1": _accuracy("run")}


def other_modes_make_the_same_updates(device):
    try:
        from tests.processes.test_families import compare
    except ModuleNotFoundError as error:
        raise Skip(f"needs {error.name}") from error
    found, bad = {}, []
    for name in ("resnet18", "vit_of_two_layers"):
        every = _ranks(compare, 2, name, device=device)
        for mode, seconds, worst, what in every[0]:
            found[f"{name}, {mode}"] = {"worst": worst, "seconds": round(seconds, 1)}
            if worst > 1e-7:
                bad.append((name, mode, worst, what))
    assert not bad, (bad, found)
    return found


def _synced(world, method):
    settings = {"sync.method": method, "train.precision": "fp32", "train.epochs": 6, "train.norm_group": "local",
                "data.name": "digits", "model.num_classes": 10}  # fmt: skip
    with _trainer(world, network_of_digits, **settings) as trainer:
        fit(trainer)
        return _weights(trainer), trainer.evaluate().top1


def sync_methods_agree(device, backend="gloo"):
    found = {}
    for method in ("bf16", "powersgd", "local"):
        (one, top1), (other, _) = _ranks(_synced, 2, method, device=device, backend=backend)
        parameters = {name: tensor for name, tensor in one.items() if "running" not in name and "tracked" not in name}
        assert _worst(other, parameters) == 0, f"{method}: processes differ"
        found[method] = top1
    assert all(top1 > 0.7 for top1 in found.values()), found
    return found


def pictures_from_a_folder_and_packed(device):
    for split, count in (("train", 24), ("val", 8)):
        make(Path("pictures", split), ("cats", "dogs"), count, size=(80, 72))
    job = ["--epochs", 2, "--batch", 16, "--set", "data.image_size=64", "--set", "train.precision=fp32", "--set",
           "data.workers=2"]  # fmt: skip
    top1 = _train(device, *job, data=("pictures", "cnn"), out="folder")
    command.done("pack pictures", by=command.start)
    return {"top1 from the folder": top1, "top1 packed": _train(device, *job, data=("pictures", "cnn"), out="packed")}


def a_loop_of_ones_own(device):
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(64, 1, 8, 8), torch.arange(64) % 10)
    model = network_of_digits()
    losses = []
    with session(cluster__device=device, precision="bf16") as mine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, batches = mine.prepare(model, optimizer, data, batch=32)
        for _ in range(20):
            for images, labels in batches:
                assert images.device == torch.device(mine.device)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                mine.backward(loss)
                optimizer.step()
                losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return {"loss before": losses[0], "loss after": losses[-1]}


def auto_precision_is_settled(device):
    _train(device, "--epochs", 1, "--set", "train.precision=auto", "--set", "train.channels_last=auto")
    plan = json.loads(Path("run", "plan.json").read_text())
    said = [event["message"] for event in command.events("run", "note")]
    return {"precision": str(plan.get("precision")), "said": "; ".join(said)}


def compiled(device):
    _accelerator(device)
    return {"top1": _train(device, "--epochs", 1, "--compile")}


def stops_when_asked_and_goes_on(device):
    words = ["train", "digits", "cnn", "--epochs", 400, "--device", device, "--out", "run", "--set",
             "train.precision=fp32", *QUIET]  # fmt: skip
    with command.training(words, by=command.start) as process:
        command.wait_until(lambda: command.events("run", "first-step"), process, 50)
        process.send_signal(signal.SIGINT)
        ended = command.finish(process)
    assert ended.code == 75, (ended.code, ended.err[-2000:])
    stopped = command.events("run", "stopped")[0]["step"]
    command.done(words, f"--set train.max_steps={stopped + 5}", by=command.start)
    assert command.events("run", "resumed")[0]["step"] == stopped
    return {"step": stopped}


def _two_cards(device):
    """The type of the two devices. Nobody has ever run what follows: it needs two cards in one machine."""
    if device == "cpu" or torch.accelerator.device_count() < 2:
        raise Unproven("needs two cards in one machine")
    return device.partition(":")[0]


def two_cards_make_the_updates_of_one(device):
    kind = _two_cards(device)
    return {"worst": _law(kind, 2, FP64, TIGHT, backend=_own_backend(kind))}


def two_cards_share_parameters(device):
    kind = _two_cards(device)
    return {"worst": _law(kind, 2, FP64, TIGHT, mode="fsdp", backend=_own_backend(kind))}


def two_cards_compress_gradients(device):
    kind = _two_cards(device)
    return sync_methods_agree(kind, _own_backend(kind))


def two_cards_hear_a_peers_death(device):
    return a_peers_death_is_heard(_two_cards(device))


# Of what is compared: relative to each tensor's largest value.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
SHAPES = ((256, 64, 32, 32), (256, 128, 16, 16), (256, 512, 4, 4))


def _trained(layer, groups, group, images, slope, *, once):
    share = BatchSharing(1, 0, group).micro_batches(len(images))[0][0]
    groups.begin_micro_batch(share.spans, share.shared_groups, len(images), len(images))
    for one in (images, *layer.parameters()):
        one.grad = None
    groups.layers[0].accumulated = None
    with mock.patch.object(norm, "is_tested_accelerator", return_value=once):
        output = layer(images)
        output.backward(slope)
    return {
        "output": output.detach(), "input": images.grad, "weight": layer.weight.grad, "bias": layer.bias.grad,
        "seen": groups.layers[0].accumulated,
    }  # fmt: skip


def _given(device, dtype, shape, layout):
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(shape[1]).to(device, torch.float64 if dtype == torch.float64 else torch.float32).train()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
    images, slope = (
        torch.randn(shape, dtype=torch.float64).to(device, dtype).contiguous(memory_format=layout) for _ in range(2)
    )
    return layer, (images + 1).requires_grad_(), slope


def groups_in_one_pass_are_what_each_is_alone(device):
    """Of a BatchNorm's forward and backward; and how long both take, of ResNet-18's layers at 256 CIFAR pictures."""
    worst, micros = {}, {}
    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype, most in ROUNDING.items():
            layer, images, slope = _given(device, dtype, (64, 8, 9, 7), layout)
            groups, _ = group_batch_norms(layer)
            alone, together = (_trained(layer, groups, 8, images, slope, once=once) for once in (False, True))
            name = f"{dtype}, {layout}".replace("torch.", "")
            worst[name] = max(
                float((together[key].double() - one.double()).abs().max() / one.double().abs().max())
                for key, one in alone.items()
            )
            assert worst[name] <= most, (name, worst)
            assert together["output"].stride() == images.stride(), name
    on_card = device != "cpu"
    for shape in SHAPES if on_card else SHAPES[2:]:
        for dtype in (torch.float32, torch.bfloat16):
            layer, images, slope = _given(device, dtype, shape, torch.channels_last)
            groups, _ = group_batch_norms(layer)
            for group in (16, 64):
                for once in (False, True):
                    name = f"{'one pass' if once else 'each alone'}, groups of {group}, {dtype}, {list(shape)}"
                    work = functools.partial(_trained, layer, groups, group, images, slope, once=once)
                    timing = time_function(work, device, 60 if on_card else 3, 10.0)
                    micros[name.replace("torch.", "")] = round(1e6 * timing.seconds)
    return {"worst": worst, "microseconds": micros}
