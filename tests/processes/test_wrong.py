"""What must not go unnoticed: lost numbers, of which all processes leave out the update, and replicas that drift."""

import json
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import RunError, UserError
from manyhands.core.world import World
from manyhands.train.loop import fit
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, assert_alike, built

SAMPLES, BATCH, EPOCHS = 60, 12, 4
PER_EPOCH = SAMPLES // BATCH


class InfiniteGradient(torch.autograd.Function):
    """Gives what it takes, and an infinite gradient if it is to spoil it."""

    @staticmethod
    def forward(ctx, values, spoils):
        ctx.spoils = spoils
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (float("inf") if ctx.spoils else 1.0), None


class Normed(nn.Module):
    """BatchNorm, and a buffer of its own that every forward in training moves; bright pictures spoil the gradient."""

    def __init__(self, *, spoils):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head, self.spoils = nn.Linear(4 * 64, 5), spoils
        self.register_buffer("passes", torch.zeros(()))
        self.double()

    def forward(self, images):
        if self.training and self.spoils:
            self.passes += 1
        found = self.head(self.body(images))
        return InfiniteGradient.apply(found, bool((images.flatten(1)[:, 0] > 50).any())) if self.spoils else found


def _pictures(bad=(), value=float("nan")):
    """Some samples' first pixel is no number, or one that spoils gradients."""
    images = torch.rand(SAMPLES, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sample in bad:
        images[sample, 0, 0, 0] = value
    return TensorDataset(images, torch.arange(SAMPLES) % 5)


def _made(world, folder, settings, bad=(17,), value=float("nan"), spoils=False):
    flags = {
        "train.batch": BATCH, "train.epochs": EPOCHS, **EXACT, "sync.every": 2, "sync.codec": "none",
        "run.log_every_s": 0.01, **settings,
    }  # fmt: skip
    return built(
        *(world, Normed(spoils=spoils), flags, folder), train_set=_pictures(bad, value), test_set=_pictures()
    )  # fmt: skip


def _trained(world, *cases, **others):
    """Of each case: weights, steps that were left out, what ended the run, and how many samples were counted."""
    found = []
    for settings in cases:
        with tempfile.TemporaryDirectory() as folder, _made(world, folder, settings, **others) as trainer:
            said = ""
            try:
                fit(trainer)
            except RunError as error:
                said = f"{error.message} | {error.where}"
            weights = {name: one.clone() for name, one in trainer.network.full_state_dict().items()}
            events, metrics = _lines(trainer.folder.events), _lines(trainer.folder.metrics)
        left_out = [event["step"] for event in events if event["kind"] == "left-out"]
        found.append((weights, left_out, said, sum(one["samples"] for one in metrics if one["kind"] == "step")))
    return found


def _lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


WAYS = {
    "through memory": {},
    "by gloo": {"parallel.shared_memory": False},
    "in several passes": {"train.micro_batch": 2, "train.norm_group": 2},
    "clipped": {"train.clip": 0.5},
    "fsdp": {"parallel.mode": "fsdp"},
    "split by samples": {"parallel.mode": "semi", "parallel.pin": ("*=n@dp",)},
    "split by outputs": {"parallel.mode": "semi", "parallel.pin": ("head=o@dp", "loss=o@dp")},
}


def test_each_epochs_bad_update_is_left_out_alike_in_every_mode():
    alone = [{key: one for key, one in way.items() if not key.startswith("parallel.")} for way in WAYS.values()]
    truths, ranks = _trained(World(), *alone), run_on_ranks(_trained, 2, *WAYS.values())
    for way, (truth, left_out, said, counted), *found in zip(WAYS, truths, *ranks, strict=True):
        assert not said
        assert len(left_out) == EPOCHS
        assert counted == EPOCHS * (SAMPLES - BATCH)
        assert all(one.isfinite().all() for one in truth.values())
        assert (found[0][1], found[0][3]) == (left_out, counted), way
        for weights, _, ended, _ in found:
            assert not ended
            assert_alike(weights, {name: truth[name] for name in weights}, 1e-9, least=1e-3)


def _spoilt(world, *cases):
    return _trained(world, *cases, value=100.0, spoils=True)


def test_a_gradient_that_is_lost_is_heard_of_by_all():
    ((truth, left_out, said, _),) = _spoilt(World(), {})
    assert not said
    assert len(left_out) == EPOCHS
    # The buffer that every forward moves hasn't moved in an update that was left out.
    assert truth.pop("passes") < EPOCHS * PER_EPOCH + 4
    for results in zip(*run_on_ranks(_spoilt, 2, {}, {"parallel.mode": "fsdp"}), strict=True):
        assert results[0][1] == left_out
        for weights, _, ended, _ in results:
            assert not ended
            assert_alike(weights, {name: one for name, one in truth.items() if name in weights}, 1e-9, least=1e-3)


def test_no_sync_method_carries_it_on():
    methods = [{"sync.method": method} for method in ("powersgd", "local", "bf16")]
    for results in zip(*run_on_ranks(_trained, 2, *methods), strict=True):
        for weights, _, ended, _ in results:
            assert not ended
            assert all(one.isfinite().all() for one in weights.values())
            assert_alike(weights, results[0][0])


def test_an_update_left_out_changes_nothing_at_all():
    """The first one of a run that ends there: the weights are those that it began with."""
    ((before, *_),) = _trained(World(), {"train.max_steps": 1, "train.lr": 1e-300}, bad=())
    ((after, left_out, _, counted),) = _trained(World(), {"train.max_steps": 1}, bad=range(SAMPLES))
    assert (left_out, counted) == ([1], 0)
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert not after["body.1.num_batches_tracked"]


def test_an_epochs_mean_loss_is_that_of_its_own_updates_if_the_last_one_is_left_out():
    with (
        tempfile.TemporaryDirectory() as folder,
        _made(World(), folder, {"run.log_every_s": 1e-9}, bad=(42,)) as trainer,
    ):
        fit(trainer)
        left_out = [event["step"] for event in _lines(trainer.folder.events) if event["kind"] == "left-out"]
        records = [one for one in _lines(trainer.folder.metrics) if one["kind"] == "step"]
    assert left_out == [5, 10, 11, 20]
    means = 0
    for epoch in range(EPOCHS):
        own = [one for one in records if (one["step"] - 1) // PER_EPOCH == epoch]
        for mean in [one["epoch_loss"] for one in own if one["epoch_loss"] is not None]:
            total = sum(one["loss"] * one["samples"] for one in own)
            assert mean == pytest.approx(total / sum(one["samples"] for one in own))
            means += 1
    assert means == sum(step * PER_EPOCH not in left_out for step in range(1, EPOCHS + 1))


def _all_bad(world, settings):
    return _trained(world, settings, bad=range(SAMPLES))[0]


def test_the_third_in_a_row_ends_the_run_with_the_last_good_weights_or_the_first_where_that_is_asked_for():
    for weights, left_out, said, _ in run_on_ranks(_all_bad, 2, {}):
        assert left_out in ([1, 2], [])
        assert "the input pictures contain NaN" in said
        assert "the last 3 updates were skipped | rank 0, step 2, samples " in said
        assert all(one.isfinite().all() for one in weights.values())
    _, left_out, said, _ = _all_bad(World(), {"train.stop_after_bad": 1})
    assert not left_out
    assert "in a row" not in said
    assert "rank 0, step 0, samples " in said


def _broken_off(world):
    return [_break_off(world, last) for last in ("buffers", "statistics")]


def _break_off(world, last):
    """What an update has changed that ends while its last results are exchanged, and is undone."""
    with _made(world, "", {}, bad=(), spoils=True) as trainer:
        updates, updater = trainer.feed.updates(0, 0), trainer.updater
        updater(next(updates), 0)
        before = {name: tensor.clone() for name, tensor in trainer.network.model.state_dict().items()}

        def ends(*_):
            raise ConnectionError("the peer has gone")

        if last == "buffers":
            updater._share_buffers = ends
        else:
            trainer.network.norms.finish_update = ends
        with pytest.raises(ConnectionError):
            updater(next(updates), 1)
        assert not updater.partial_update.in_pieces
        updater.partial_update.undo()
        return [n for n, tensor in trainer.network.model.state_dict().items() if not torch.equal(tensor, before[n])]


def test_update_changes_nothing_if_a_peer_ends_in_its_last_collective():
    assert run_on_ranks(_broken_off, 2) == [[[], []]] * 2


class Wrong(nn.Module):
    """Does something wrong on one rank from its fourth training pass on."""

    def __init__(self, wrong, rank):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 5)
        self.wrong, self.rank, self.passes = wrong, rank, 0

    def forward(self, images):
        outputs = self.linear(images.flatten(1))
        self.passes += self.training
        if self.passes < 4 or self.rank != 1:
            return outputs
        if self.wrong == "drift":
            self.linear.bias.data += 1
        return InfiniteGradient.apply(outputs * (float("nan") if self.wrong == "loss" else 1), self.wrong == "gradient")


def _fit(world, wrong, accelerator=False, mode="data", sync="allreduce", rank=None):
    """What ended the run, and where."""
    flags = {
        "data.name": "synthetic:40x1x8x8x5", "train.batch": 8, "train.epochs": 3, "train.audit_every": 5,
        "checkpoint.every": "2steps", "sync.method": sync, "sync.every": 2, "sync.codec": "none",
        "parallel.mode": mode, "train.evaluate_every": 1,
    }  # fmt: skip
    with built(world, Wrong(wrong, world.rank if rank is None else rank), flags) as trainer:
        if accelerator:
            # The path of devices that are not waited for at every step.
            trainer.updater.device, trainer.updater.gradients.on_card = "accelerator", True
        before = [one.detach().clone() for one in trainer.network.model.parameters()]
        try:
            fit(trainer)
        except RunError as error:
            # The update that would have spoilt them was not made, and earlier ones were.
            parameters = list(trainer.network.model.parameters())
            assert all(torch.isfinite(one).all() for one in parameters)
            assert mode == "fsdp" or not torch.equal(before[0], parameters[0])
            return error.message, error.where
        except RuntimeError as error:
            return "", str(error)
    return "", ""


@pytest.mark.parametrize(
    ("size", "how", "what", "where"),
    [
        (3, ("drift",), "drifted apart: linear.bias", "rank 1, linear.bias"),
        # One pass comes before the first step: the trial. Of three bad updates in a row the last one ends the run.
        (3, ("gradient",), "the gradient of linear.", "rank 1, step 4"),
        (2, ("loss", True), "the loss is not finite", "rank 1, step 2"),
        # An accelerator leaves out the update, and tells of it later.
        (2, ("gradient", True), "a gradient is not finite", "rank 0, step 2"),
        (2, ("loss", False, "fsdp"), "the loss is not finite; the last 3 updates were skipped", "rank 1, step 4, "),
    ],
)
def test_what_goes_wrong_on_one_process_is_named_by_all(size, how, what, where):
    for message, place in run_on_ranks(_fit, size, *how):
        assert what in message
        assert place.startswith(where) if where.endswith(" ") else place == where


@pytest.mark.timeout(60)
def test_a_process_that_trains_by_itself_reports_a_lost_gradient_alone():
    # Rank 0 trains on, and would be waited for as long as collectives may take.
    what, where = run_on_ranks(_fit, 2, "gradient", False, "data", "local")[1]
    assert "the gradient of linear." in what
    assert where.startswith("rank 1, step ")


def test_one_process_alone():
    message, _ = _fit(World(), "gradient", mode="single", rank=1)
    assert "gradient of linear" in message


class Centered(nn.Module):
    """Keeps a mean of its own samples; starts late to write into one buffer and to replace another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("constant", torch.ones(5, dtype=torch.bool))
        self.passes = 0

    def forward(self, values):
        if self.training:
            self.passes += 1
            with torch.no_grad():
                self.mean.lerp_(values.mean(), 0.1)
                self.seen += len(values)
                if self.passes > 4:
                    self.late += (values[:, 0, 0, 0] > 0).sum().to(torch.int16)
                    self.replaced = 0.9 * self.replaced + values.mean()
        return values - self.mean


def _fit_moving(world, mode):
    flags = {"data.name": "synthetic:40x1x8x8x5", "train.batch": 9, "train.epochs": 2, "train.audit_every": 1}
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), Centered(), nn.Flatten(), nn.Linear(144, 5)
    )
    with built(world, net, {**flags, "parallel.mode": mode}) as trainer:
        write_metadata(trainer)
        fit(trainer)
        exceptions = json.loads(trainer.folder.plan.read_text())["exceptions"] if world.is_main else []
    return {name: one.tolist() for name, one in net.named_buffers()}, exceptions


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_buffers_that_each_process_moves_by_its_own_samples_are_kept_equal_and_named(mode):
    (first, exceptions), (second, _) = run_on_ranks(_fit_moving, 2, mode)
    assert first == second
    assert first["2.seen"] > 0
    assert first["2.replaced"] != [0]
    (exception,) = exceptions
    assert exception.startswith("1.running_mean, 1.running_var, 2.mean and 3 more buffers: each process updates")


def test_one_process_alone_names_no_buffers():
    assert _fit_moving(World(), "single")[1] == []


def test_samples_that_hold_nan_are_named_and_no_option_is_blamed(tmp_path):
    images = torch.zeros(40, 1, 8, 8)
    images[17, 0, 3] = float("nan")
    data = TensorDataset(images, torch.arange(40) % 5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    with pytest.raises(RunError) as caught:
        manyhands.fit(net, data, data, epochs=1, batch=40, out=tmp_path / "run", quiet=True, run__report=False,
                      train__stop_after_bad=1)  # fmt: skip
    assert "input pictures" in caught.value.message
    assert str(caught.value.where).endswith("samples 17")
    assert not any("train." in line for line in caught.value.hints)


class Spectral(nn.Module):
    """Multiplies frequencies."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.linear = nn.Parameter(weight), nn.Linear(64, 5)

    def forward(self, images):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.linear(torch.fft.irfft2(torch.fft.rfft2(images[:, 0]) * weight, s=(8, 8)).flatten(1))


FEW = {"data.name": "synthetic:40x1x8x8x5", "train.batch": 8, "train.epochs": 1}


def _linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (_linear().requires_grad_(False), "no trainable parameters"),
        (nn.Flatten(), "no trainable parameters"),
        (Spectral(torch.ones(8, 5, dtype=torch.cfloat)), "the parameter weight is complex"),
    ],
)
def test_what_can_not_be_trained_is_refused_in_one_sentence(net, said):
    with pytest.raises(UserError, match=said), built(World(), net, FEW):
        pass


def test_what_the_refusal_of_complex_parameters_advises_trains():
    net = Spectral(torch.view_as_real(torch.ones(8, 5, dtype=torch.cfloat)).clone())
    before = net.weight.detach().clone()
    with built(World(), net, FEW) as trainer:
        fit(trainer)
    assert not torch.equal(before, net.weight)


def _build_frozen(world):
    """Of two processes one has nothing to train, as a piece of a network on a mesh may."""
    net = _linear().requires_grad_(world.is_main)
    with pytest.raises(UserError) as caught, built(world, net, FEW, mode="hybrid"):
        pass
    return caught.value.message


def test_all_processes_refuse_a_network_of_which_one_has_nothing_to_train():
    assert run_on_ranks(_build_frozen, 2) == ["the network has no trainable parameters on rank 1"] * 2


class Counting(nn.Module):
    """Notes how many samples it is given; may have no memory for any."""

    def __init__(self, *, full=False):
        super().__init__()
        self.inner, self.full, self.tried = _linear(), full, []

    def forward(self, images):
        self.tried.append(len(images))
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.inner(images)


def _largest(count):
    return lambda output, labels: (
        nn.functional.cross_entropy(output, labels, reduction="none").topk(count).values.mean()
    )


@pytest.mark.parametrize(("needed", "tried"), [(4, [8]), (9, [8, 36])])
def test_custom_loss_is_tried_on_few_samples_and_on_a_full_share_only_if_needed(needed, tried):
    with built(World(), net := Counting(), {**FEW, "train.batch": 36}, loss=_largest(needed)):
        assert net.tried == [*tried, 2, 2]  # the time that an update takes is estimated from two passes


def test_a_trial_that_runs_out_of_memory_is_not_tried_with_more_samples():
    net, flags = Counting(full=True), {**FEW, "train.batch": 36}
    with pytest.raises(torch.OutOfMemoryError), built(World(), net, flags, loss=_largest(4)):
        pass
    assert net.tried == [8]
