"""What must not go unnoticed: lost numbers, of which all processes leave out the update, and replicas that drift."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.core.errors import RunError, UserError
from manyhands.core.world import World
from manyhands.train.loop import fit
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, SMALL, assert_alike, built, by_case, for_each, linear, train

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


def _pictures(bad, value=float("nan")):
    """Some samples' first pixel is no number, or one that spoils gradients."""
    images = torch.rand(SAMPLES, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sample in bad:
        images[sample, 0, 0, 0] = value
    return TensorDataset(images, torch.arange(SAMPLES) % 5)


FLAGS = {
    "train.batch": BATCH, "train.epochs": EPOCHS, **EXACT, "sync.every": 2, "sync.codec": "none",
    "data.augment": "none", "run.log_every_s": 1e-9,
}  # fmt: skip


def _trained(world, settings, bad, value, spoils):
    """What comes of it where some samples have a value, and spoil gradients."""
    make, data = (
        functools.partial(Normed, spoils=spoils),
        {"train_set": _pictures(bad, value), "test_set": _pictures(())},
    )
    return train(world, 0, make, {**FLAGS, **settings}, ends=True, **data)


def _nan(settings, bad=(17,)):
    return settings, bad, float("nan"), False


def _left_out(found):
    return [event["step"] for event in found.events if event["kind"] == "left-out"]


def _counted(found):
    return sum(one["samples"] for one in found.metrics if one["kind"] == "step")


WAYS = {
    "through memory": {},
    "by gloo": {"parallel.shared_memory": False},
    "in several passes": {"train.micro_batch": 2, "train.norm_group": 2},
    "clipped": {"train.clip": 0.5},
    "fsdp": {"parallel.mode": "fsdp"},
    "split by samples": {"parallel.mode": "semi", "parallel.pin": ("*=n@dp",)},
    "split by outputs": {"parallel.mode": "semi", "parallel.pin": ("head=o@dp", "loss=o@dp")},
}


SPOILT = [({}, (17,), 100.0, True), ({"parallel.mode": "fsdp"}, (17,), 100.0, True)]
METHODS = [_nan({"sync.method": method}) for method in ("powersgd", "local", "bf16")]


@pytest.fixture(scope="module")
def on_two():
    """By case, what came of it on both processes."""
    cases = [*map(_nan, WAYS.values()), *SPOILT, *METHODS, _nan({}, range(SAMPLES))]
    found = by_case(2, _trained, cases)
    return found[: len(WAYS)], found[len(WAYS) : len(WAYS) + 2], found[-4:-1], found[-1]


def test_each_epochs_bad_update_is_left_out_alike_in_every_mode(on_two):
    alone = [{key: one for key, one in way.items() if not key.startswith("parallel.")} for way in WAYS.values()]
    truths = for_each(World(), _trained, [*map(_nan, alone), SPOILT[0], SPOILT[0]])
    for truth, found in zip(truths, [*on_two[0], *on_two[1]], strict=True):
        assert not truth.ended
        assert len(_left_out(truth)) == EPOCHS
        assert _counted(truth) == EPOCHS * (SAMPLES - BATCH)
        assert all(one.isfinite().all() for one in truth.model.values())
        assert (_left_out(found[0]), _counted(found[0])) == (_left_out(truth), _counted(truth))
        # The buffer that every forward moves hasn't moved in an update that was left out.
        assert truth.model.pop("passes") < EPOCHS * PER_EPOCH + 4
        for one in found:
            assert not one.ended
            one.model.pop("passes", None)
            assert_alike(one.model, {name: truth.model[name] for name in one.model}, 1e-9, least=1e-3)


def test_no_sync_method_carries_it_on(on_two):
    for found in on_two[2]:
        for one in found:
            assert not one.ended
            assert all(tensor.isfinite().all() for tensor in one.model.values())
            assert_alike(one.model, found[0].model)


def test_an_update_left_out_changes_nothing_at_all():
    """The first one of a run that ends there: the weights are those that it began with."""
    cases = [_nan({"train.max_steps": 1, "train.lr": 1e-300}, ()), _nan({"train.max_steps": 1}, range(SAMPLES))]
    before, after = for_each(World(), _trained, cases)
    assert (_left_out(after), _counted(after)) == ([1], 0)
    assert torch.equal(before.model["head.weight"], after.model["head.weight"])
    assert not after.model["body.1.num_batches_tracked"]


def test_an_epochs_mean_loss_is_that_of_its_own_updates_if_the_last_one_is_left_out():
    found = _trained(World(), *_nan({}, (42,)))
    records = [one for one in found.metrics if one["kind"] == "step"]
    assert _left_out(found) == [5, 10, 11, 20]
    means = 0
    for epoch in range(EPOCHS):
        own = [one for one in records if (one["step"] - 1) // PER_EPOCH == epoch]
        for mean in [one["epoch_loss"] for one in own if one["epoch_loss"] is not None]:
            total = sum(one["loss"] * one["samples"] for one in own)
            assert mean == pytest.approx(total / sum(one["samples"] for one in own))
            means += 1
    assert means == sum(step * PER_EPOCH not in _left_out(found) for step in range(1, EPOCHS + 1))


def test_the_third_in_a_row_ends_the_run_with_the_last_good_weights_or_the_first_where_that_is_asked_for(on_two):
    for found in on_two[3]:
        assert _left_out(found) in ([1, 2], [])
        assert "the input pictures contain NaN" in found.ended
        assert "the last 3 updates were skipped | rank 0, step 2, samples " in found.ended
        assert all(one.isfinite().all() for one in found.model.values())
    found = _trained(World(), *_nan({"train.stop_after_bad": 1}))
    assert not _left_out(found)
    assert "in a row" not in found.ended
    # Samples that hold NaN are named.
    assert "input pictures" in found.ended
    assert found.ended.endswith("samples 17")


def _break_off(world, last):
    """What an update has changed that ends while its last results are exchanged, and is undone."""
    data = {"train_set": _pictures(()), "test_set": _pictures(())}
    with built(world, Normed(spoils=True), {**SMALL, **FLAGS}, **data) as trainer:
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
    assert by_case(2, _break_off, [("buffers",), ("statistics",)]) == [([], [])] * 2


class Wrong(nn.Module):
    """Does something wrong on one rank from its fourth training pass on."""

    def __init__(self, wrong, rank):
        super().__init__()
        self.inner, self.wrong, self.rank, self.passes = linear(), wrong, rank, 0

    def forward(self, images):
        outputs = self.inner(images)
        self.passes += self.training
        if self.passes < 4 or self.rank != 1:
            return outputs
        if self.wrong == "drift":
            self.inner[1].bias.data += 1
        return InfiniteGradient.apply(outputs * (float("nan") if self.wrong == "loss" else 1), self.wrong == "gradient")


def _fit(world, wrong, accelerator=False, mode="data", sync="allreduce"):
    """What ended the run, and where."""
    flags = {
        **SMALL, "train.batch": 20, "train.epochs": 3, "train.audit_every": 5, "checkpoint.every": "2steps",
        "sync.method": sync, "sync.every": 2, "sync.codec": "none", "parallel.mode": mode, "train.evaluate_every": 1,
    }  # fmt: skip
    with built(world, Wrong(wrong, 1 if world.alone else world.rank), flags) as trainer:
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


FAULTS = {
    3: [
        (("drift",), "drifted apart: inner.1.bias", "rank 1, inner.1.bias"),
        # One pass comes before the first step: the trial. Of three bad updates in a row the last one ends the run.
        (("gradient",), "the gradient of inner.1.", "rank 1, step 4"),
    ],
    2: [
        (("loss", True), "the loss is not finite", "rank 1, step 2"),
        # An accelerator skips the update and reports it later.
        (("gradient", True), "a gradient is not finite", "rank 0, step 2"),
        (("loss", False, "fsdp"), "the loss is not finite; the last 3 updates were skipped", "rank 1, step 4"),
    ],
    1: [(("gradient",), "the gradient of inner.1.", "")],
}


@pytest.mark.parametrize("size", FAULTS)
def test_what_goes_wrong_on_one_process_is_named_by_all(size):
    found = by_case(size, _fit, [how for how, *_ in FAULTS[size]])
    for (_, what, where), answers in zip(FAULTS[size], found, strict=True):
        for message, place in answers:
            assert what in message
            assert place.split(", samples")[0].startswith(where)


@pytest.mark.timeout(60)
def test_a_process_that_trains_by_itself_reports_a_lost_gradient_alone():
    # Rank 0 trains on, and would be waited for as long as collectives may take.
    what, where = run_on_ranks(_fit, 2, "gradient", False, "data", "local")[1]
    assert "the gradient of inner.1." in what
    assert where.startswith("rank 1, step ")


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


def _moving():
    torch.manual_seed(3)
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, Centered(), nn.Flatten(), nn.Linear(144, 5))


def _fit_moving(world, mode):
    """The buffers, and what plan.json names."""
    flags = {**SMALL, "train.batch": 20, "train.epochs": 2, "train.audit_every": 1, "parallel.mode": mode}
    with built(world, net := _moving(), flags) as trainer:
        write_metadata(trainer)
        fit(trainer)
        exceptions = json.loads(trainer.folder.plan.read_text())["exceptions"] if world.is_main else []
    return {name: one.tolist() for name, one in net.named_buffers()}, exceptions


def test_buffers_that_each_process_moves_by_its_own_samples_are_kept_equal_and_named():
    for (first, exceptions), (second, _) in by_case(2, _fit_moving, [("data",), ("fsdp",)]):
        assert first == second
        assert first["2.seen"] > 0
        assert first["2.replaced"] != [0]
        (exception,) = exceptions
        assert exception.startswith("1.running_mean, 1.running_var, 2.mean and 3 more buffers: each process updates")
    assert _fit_moving(World(), "single")[1] == []


class Spectral(nn.Module):
    """Multiplies frequencies."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(8, 5, dtype=torch.cfloat)), linear()

    def forward(self, images):
        return self.inner(torch.fft.irfft2(torch.fft.rfft2(images[:, 0]) * self.weight, s=(8, 8)))


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (linear().requires_grad_(False), "no trainable parameters"),
        (nn.Flatten(), "no trainable parameters"),
        (Spectral(), "the parameter weight is complex"),
    ],
)
def test_what_can_not_be_trained_is_refused_in_one_sentence(net, said):
    with pytest.raises(UserError, match=said), built(World(), net, SMALL):
        pass


def _build_frozen(world):
    """Of two processes one has nothing to train, as a piece of a network on a mesh may."""
    net = linear().requires_grad_(world.is_main)
    with pytest.raises(UserError) as caught, built(world, net, SMALL, mode="hybrid"):
        pass
    return caught.value.message


def test_all_processes_refuse_a_network_of_which_one_has_nothing_to_train():
    assert run_on_ranks(_build_frozen, 2) == ["the network has no trainable parameters on rank 1"] * 2


def _largest(output, labels):
    """Takes nine samples at least."""
    return F.cross_entropy(output, labels, reduction="none").topk(9).values.mean()


class Full(nn.Module):
    """Has no memory for any sample, and notes how many it was given."""

    def __init__(self):
        super().__init__()
        self.inner, self.tried = linear(), []

    def forward(self, images):
        self.tried.append(len(images))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_custom_loss_is_tried_on_a_full_share_where_few_samples_are_not_enough_but_never_where_memory_is_not():
    with built(World(), linear(), {**SMALL, "train.batch": 36}, loss=_largest):
        pass
    with pytest.raises(torch.OutOfMemoryError), built(World(), full := Full(), SMALL, loss=_largest):
        pass
    assert full.tried == [8]
