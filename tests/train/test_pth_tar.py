"""What main.py reads from a file that was written here is what it would have written itself."""

import signal
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.checkpoint.foreign import read_foreign, write_foreign
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.config.job import CheckpointOptions
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train.loop import fit
from manyhands.train.saving import _write_pth_tar, as_pth_tar, check_same_training
from manyhands.train.state import Progress
from tests.processes.updates import built

RECIPE = "imagenet-main"


def snapshot():
    groups = [{"params": ["w"], "lr": 0.123, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": False, "fused": True}]
    return Snapshot({"w": torch.ones(2)}, {"state": {"w": {"momentum_buffer": torch.ones(2)}}, "param_groups": groups})


def job_of(**options):
    flags = {f"train.{name}": value for name, value in options.items()}
    return load_job(flags, recipe=RECIPE, environment={}).job


@settings(deadline=None)
@given(
    epoch=st.integers(1, 100), steps=st.integers(1, 50), lr=st.floats(1e-3, 1), every=st.integers(1, 40),
    factor=st.floats(0.05, 1), best=st.floats(-1, 1),
)  # fmt: skip
def test_scheduler_resumes_as_torchs_own(epoch, steps, lr, every, factor, best):
    train = job_of(epochs=200, lr=lr, step_epochs=every, step_factor=factor).train
    progress = Progress(step=epoch * steps, epoch=epoch, best_figure=best)
    found = as_pth_tar(snapshot(), train, progress, steps)
    own = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(own, every, factor)
    for _ in range(epoch):
        own.step()
        scheduler.step()
    (group,) = found.optimizer["param_groups"]
    assert group["lr"] == pytest.approx(own.param_groups[0]["lr"])
    assert group["initial_lr"] == own.param_groups[0]["initial_lr"]
    assert group["fused"] is None
    written, theirs = found.state["scheduler"], scheduler.state_dict()
    assert {key: theirs[key] for key in written} == {**written, "_last_lr": pytest.approx(written["_last_lr"])}
    assert found.state["epoch"] == epoch
    assert found.state["best"]["top1"] == max(0, best)


@pytest.mark.parametrize(("device", "prefix"), [("cuda:0", "module."), ("npu:0", ""), ("cpu", "")])
def test_the_names_are_those_of_main_py_which_wraps_a_network_on_cuda_alone(tmp_path, device, prefix):
    job = job_of(lr=0.4).model_copy(update={"checkpoint": CheckpointOptions(pth_tar=str(tmp_path))})
    run = SimpleNamespace(job=job, world=World(device=device), folder=RunFolder(tmp_path))
    _write_pth_tar(run, as_pth_tar(snapshot(), job.train, Progress(step=10, epoch=2), 5), best=False)
    assert list(torch.load(tmp_path / "checkpoint.pth.tar")["state_dict"]) == [f"{prefix}w"]


def test_other_rates_than_the_files_are_refused_by_flag(tmp_path):
    job = job_of(lr=0.4)
    path = tmp_path / "checkpoint.pth.tar"
    write_foreign(path, as_pth_tar(snapshot(), job.train, Progress(step=10, epoch=2), 5), "resnet18")
    check_same_training(job, read_foreign(path), str(path))
    for options, flag in (
        ({}, "--lr 0.4"),
        ({"lr": 0.4, "momentum": 0.8}, "--momentum 0.9"),
        ({"lr": 0.4, "weight_decay": 1e-3}, "--weight-decay 0.0001"),
        ({"lr": 0.4, "nesterov": True}, "--train.nesterov false"),
        ({"lr": 0.4, "step_epochs": 10}, "--train.step-epochs 30"),
    ):
        with pytest.raises(UserError) as caught:
            check_same_training(job_of(**options), read_foreign(path), str(path))
        assert caught.value.hints[0] == f"resume with {flag}"
    # `manyhands train` takes its own rates.
    plain = load_job({"data.name": "synthetic"}, environment={}).job
    check_same_training(plain, read_foreign(path), str(path))


def test_an_old_file_says_less_and_is_taken(tmp_path):
    torch.save({"epoch": 1, "arch": "resnet18", "state_dict": {"w": torch.ones(2)}}, tmp_path / "old.pth.tar")
    check_same_training(job_of(lr=0.4), read_foreign(tmp_path / "old.pth.tar"), "old.pth.tar")
    other = load_job({"model.name": "torchvision:resnet34"}, recipe=RECIPE, environment={}).job
    with pytest.raises(UserError, match="-a resnet18, not resnet34"):
        check_same_training(other, read_foreign(tmp_path / "old.pth.tar"), "old.pth.tar")


def test_a_stop_at_the_end_of_an_epoch_without_an_evaluation_writes_the_file_too(tmp_path):
    flags = {"data.name": "synthetic:24x1x8x8x5", "model.name": "cnn", "train.batch": 6, "train.epochs": 4}
    flags |= {"train.evaluate_every": 4, "train.schedule": "constant", "checkpoint.pth_tar": str(tmp_path / "main")}
    with built(World(), None, flags, tmp_path) as trainer:
        count = trainer.count_update

        def counted():
            count()
            if trainer.progress.step == 8:
                signal.raise_signal(signal.SIGTERM)

        trainer.count_update = counted
        assert fit(trainer) == "stopped"
    assert read_foreign(tmp_path / "main" / "checkpoint.pth.tar").state["epoch"] == 2
