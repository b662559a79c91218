"""What must not go unnoticed: replicas that drift apart, numbers that are lost."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.config.load import load_job
from manyhands.core.errors import RunError, UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train.build import build
from manyhands.train.loop import fit
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.worker.run_metadata import write_metadata
from tests.processes.ranks import run_on_ranks


class Net(nn.Module):
    """A network that does something wrong on one rank from its fourth training pass on."""

    def __init__(self, wrong, rank):
        super().__init__()
        self.linear = nn.Linear(64, 5)
        self.wrong, self.rank, self.passes = wrong, rank, 0

    def forward(self, images):
        outputs = self.linear(images.flatten(1))
        self.passes += self.training
        if self.passes >= 4 and self.rank == 1:
            if self.wrong == "drift":
                self.linear.bias.data += 1
            elif self.wrong == "loss":
                outputs = outputs * float("nan")
            elif self.wrong == "gradient":
                outputs = _InfiniteGradient.apply(outputs)
        return outputs


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def _fit(world, wrong, accelerator, mode="data", sync="allreduce"):
    flags = {
        "data.name": "synthetic:40x1x8x8x5", "train.batch": 8, "train.epochs": 3, "train.audit_every": 5,
        "checkpoint.every": "2steps", "sync.method": sync, "sync.every": 2, "sync.codec": "none",
    }  # fmt: skip
    job = load_job(flags, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), world, mode, Objects(Net(wrong, world.rank))))
        if accelerator:
            # The path of devices that are not waited for at every step.
            trainer.updater.device, trainer.updater.gradients.on_card = "accelerator", True
        try:
            fit(trainer)
        except RunError as error:
            # The update that would have spoilt them was not made.
            assert all(torch.isfinite(one).all() for one in trainer.network.model.parameters())
            return error.message, error.where
        finally:
            trainer.saver.wait()  # as an entry does, before the folder goes
        return "", ""


def test_a_drifted_replica_is_named_with_its_tensor():
    for what, where in run_on_ranks(_fit, 3, "drift", False):
        assert "drifted apart: linear.bias" in what
        assert where == "rank 1, linear.bias"


class _Centred(nn.Module):
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


def _fit_moving(world, mode, samples):
    flags = {"data.name": f"synthetic:{samples}x1x8x8x5", "train.batch": 9, "train.epochs": 2, "train.audit_every": 1}
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), _Centred(), nn.Flatten(), nn.Linear(144, 5)
    )
    with tempfile.TemporaryDirectory() as folder:
        RunFolder(Path(folder)).ranks.mkdir()
        trainer = build(
            Parts.from_job(load_job(flags, environment={}).job, RunFolder(Path(folder)), world, mode, Objects(net))
        )
        write_metadata(trainer)
        fit(trainer)
        trainer.saver.wait()
        exceptions = json.loads(RunFolder(Path(folder)).plan.read_text())["exceptions"] if world.is_main else []
    return {name: one.tolist() for name, one in net.named_buffers()}, exceptions


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_buffers_that_each_process_moves_by_its_own_samples_are_kept_equal_and_named(mode):
    (first, exceptions), (second, _) = run_on_ranks(_fit_moving, 2, mode, 40)
    assert first == second
    assert first["2.seen"] > 0
    assert first["2.replaced"] != [0]
    (exception,) = exceptions
    assert exception.startswith("1.running_mean, 1.running_var, 2.mean and 3 more buffers: each process updates")


def test_one_process_alone_names_no_buffers():
    assert run_on_ranks(_fit_moving, 1, "single", 40)[0][1] == []


def test_a_gradient_that_is_not_finite_names_rank_step_and_tensor():
    for what, where in run_on_ranks(_fit, 3, "gradient", False):
        assert "the gradient of linear." in what
        # One pass comes before the first step: the rehearsal. The one that settles DDP's buckets isn't needed here.
        # Of three bad updates in a row the last one ends the run.
        assert where == "rank 1, step 4"


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


class _Spectral(nn.Module):
    """Multiplies frequencies."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.linear = nn.Parameter(weight), nn.Linear(64, 5)

    def forward(self, images):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.linear(torch.fft.irfft2(torch.fft.rfft2(images[:, 0]) * weight, s=(8, 8)).flatten(1))


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).requires_grad_(False), "no trainable parameters"),
        (nn.Flatten(), "no trainable parameters"),
        (_Spectral(torch.ones(8, 5, dtype=torch.cfloat)), "the parameter weight is complex"),
    ],
)
def test_what_can_not_be_trained_is_refused_in_one_sentence(net, told, tmp_path):
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 8}, environment={}).job
    with pytest.raises(UserError, match=told):
        build(Parts.from_job(job, RunFolder(tmp_path), World(), "single", Objects(net)))


def _build_frozen(world):
    """Of two processes one has nothing to train, as a piece of a network on a mesh may."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).requires_grad_(world.is_main)
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 8}, environment={}).job
    with tempfile.TemporaryDirectory() as folder, pytest.raises(UserError) as caught:
        build(Parts.from_job(job, RunFolder(Path(folder)), world, "hybrid", Objects(net)))
    return caught.value.message


def test_all_processes_refuse_a_network_of_which_one_has_nothing_to_train():
    told = "the network has no trainable parameters on rank 1"
    assert run_on_ranks(_build_frozen, 2) == [told, told]


def _largest_losses(output, labels):
    return nn.functional.cross_entropy(output, labels, reduction="none").topk(4).values.mean()


class _OutOfMemory(nn.Linear):
    """Has no memory for any number of samples, and notes these numbers."""

    def __init__(self):
        super().__init__(64, 5)
        self.tried = []

    def forward(self, images):
        self.tried.append(len(images))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _Counting(nn.Sequential):
    """Notes how many samples it is given."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 5))
        self.tried = []

    def forward(self, images):
        self.tried.append(len(images))
        return super().forward(images)


@pytest.mark.parametrize(("needed", "tried"), [(4, [8]), (9, [8, 36])])
def test_a_custom_loss_is_tried_on_a_few_samples_and_on_a_whole_share_only_where_it_needs_more(needed, tried, tmp_path):
    def loss(output, labels):
        return nn.functional.cross_entropy(output, labels, reduction="none").topk(needed).values.mean()

    net = _Counting()
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 36}, environment={}).job
    build(Parts.from_job(job, RunFolder(tmp_path), World(), "single", Objects(net, loss=loss)))
    assert net.tried == [*tried, 2, 2]  # the time that an update takes is estimated from two passes


def test_a_trial_that_runs_out_of_memory_is_not_tried_with_more_samples(tmp_path):
    net = _OutOfMemory()
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 36}, environment={}).job
    with pytest.raises(torch.OutOfMemoryError):
        build(Parts.from_job(job, RunFolder(tmp_path), World(), "single", Objects(net, loss=_largest_losses)))
    assert net.tried == [8]


def test_what_the_refusal_of_complex_parameters_advises_trains(tmp_path):
    net = _Spectral(torch.view_as_real(torch.ones(8, 5, dtype=torch.cfloat)).clone())
    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 8, "train.epochs": 1}, environment={}).job
    trainer = build(Parts.from_job(job, RunFolder(tmp_path), World(), "single", Objects(net)))
    before = net.weight.detach().clone()
    fit(trainer)
    trainer.saver.wait()
    assert not torch.equal(before, net.weight)


def test_lost_numbers_on_an_accelerator_stop_all_processes():
    for what, where in run_on_ranks(_fit, 2, "loss", True):
        assert what == "the loss is not finite"
        # One pass comes before the first step: the rehearsal.
        assert where == "rank 1, step 2"


def test_an_accelerator_leaves_out_an_update_with_a_lost_gradient_and_tells_of_it_later():
    for what, where in run_on_ranks(_fit, 2, "gradient", True):
        assert what == "a gradient is not finite"
        assert where == "rank 0, step 2"


def test_where_processes_hold_pieces_all_hear_of_a_lost_loss():
    for what, where in run_on_ranks(_fit, 2, "loss", False, "fsdp"):
        assert what == "the loss is not finite; the last 3 updates were skipped"
        assert where.startswith("rank 1, step 4, samples ")


def _first_words(world, wrong, mode, sync):
    try:
        return _fit(world, wrong, False, mode, sync)
    except RuntimeError as error:
        return "", str(error)


@pytest.mark.timeout(60)
def test_a_process_that_trains_by_itself_tells_of_a_lost_gradient_alone():
    # Rank 0 trains on, and would be waited for as long as collectives may take.
    what, where = run_on_ranks(_first_words, 2, "gradient", "data", "local")[1]
    assert "the gradient of linear." in what
    assert where.startswith("rank 1, step ")


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_one_process_alone(wrong):
    class Always(Net):
        def __init__(self, wrong):
            super().__init__(wrong, 1)

    job = load_job({"data.name": "synthetic:40x1x8x8x5", "train.batch": 8}, environment={}).job
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Parts.from_job(job, RunFolder(Path(folder)), World(), "single", Objects(Always(wrong))))
        before = [p.detach().clone() for p in trainer.network.model.parameters()]
        with pytest.raises(RunError) as caught:
            fit(trainer)
        assert "not finite" in caught.value.message or "gradient of linear" in caught.value.message
        # The update that would have spoilt them was not made.
        assert all(torch.isfinite(p).all() for p in trainer.network.model.parameters())
        assert not torch.equal(before[0], next(trainer.network.model.parameters()))
