"""Loops as users write them: where they step, clear, clip and leave, and what a session can't take is said."""

import io
import math
import signal
import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

import manyhands
from manyhands.core.errors import EXIT_SAVED, UserError
from manyhands.core.world import World
from tests.processes.ranks import run_on_ranks
from tests.processes.test_session import assert_close, convolution, opened, pictures, weights_of

PLACES = ("first", "before the optimizer", "last")


def _plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


def _loop(here, net, body, *, schedule=None, parameters=None):
    """Trains an epoch with what the body does at each micro-batch; the optimizer's last learning rate."""
    sgd = torch.optim.SGD(net.parameters() if parameters is None else parameters, 0.5)
    scheduler = schedule(sgd) if schedule else None
    model, optimizer, batches = here.prepare(net, sgd, pictures(), batch=16, scheduler=scheduler)
    for _ in here.epochs(1):
        for x, y in batches:
            body(model, optimizer, scheduler, lambda x=x, y=y: here.backward(F.cross_entropy(model(x), y)))
    return sgd.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("micro_batch", [0, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_scheduler_steps_once_an_update_wherever_in_the_loop(place, micro_batch):
    def body(_model, optimizer, scheduler, backward):
        for name, act in zip(PLACES, (backward, optimizer.step, lambda: None), strict=True):
            if name == place:
                scheduler.step()
            act()

    with manyhands.session(micro_batch=micro_batch) as here:
        rate = _loop(here, _plain(), body, schedule=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5))
    assert rate == 0.5 * 0.5**4


def _clears(model, optimizer, _scheduler, backward):
    model.zero_grad()
    backward()
    optimizer.step()


def _clips(model, optimizer, _scheduler, backward):
    optimizer.zero_grad()
    backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


@pytest.mark.parametrize("body", [_clears, _clips])
def test_gradients_of_an_unfinished_update_are_not_changed_unnoticed(body):
    with manyhands.session() as here:
        _loop(here, _plain(), body)
    # Nor are scaled ones.
    for settings in [{"micro_batch": 5}, *([{"precision": "fp16"}] if body is _clips else [])]:
        net = _plain().float() if "precision" in settings else _plain()
        with manyhands.session(**settings) as here, pytest.raises(UserError, match="changed gradients"):
            _loop(here, net, body)


def _counted(world):
    """A plain loop that looks at what its optimizer and scheduler do within an update of several micro-batches."""
    net, moved, steps, rate = convolution().double(), [], 0, 0.5
    with opened(world, **{"train.micro_batch": 4, "train.clip": 1e-3}) as here:
        sgd = torch.optim.SGD(net.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)
        model, optimizer, batches = here.prepare(net, sgd, pictures(), batch=17, scheduler=scheduler)
        for _ in here.epochs(1):
            for x, y in batches:
                before = weights_of(net)
                here.backward(F.cross_entropy(model(x), y))
                optimizer.zero_grad()
                optimizer.step()
                scheduler.step()
                change = [(before[name] - one.detach()).flatten() / rate for name, one in net.named_parameters()]
                moved.append(float(torch.cat(change).norm()))
                rate, steps = optimizer.param_groups[0]["lr"], steps + 1
    return steps, scheduler.last_epoch, rate, [one for one in moved if one > 0]


@pytest.mark.parametrize("size", [1, 2])
def test_within_an_update_nothing_is_stepped_or_zeroed(size):
    for steps, epochs, rate, moved in run_on_ranks(_counted, size):
        assert steps > 4
        assert len(moved) == epochs == 4
        assert rate == pytest.approx(0.5 * 0.1**2)
        assert all(norm <= 1.01e-3 for norm in moved)


def test_clipping_counts_what_the_optimizer_has():
    found = []
    for frozen in (True, False):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)).double()
        net[1].requires_grad_(not frozen)
        with manyhands.session(clip=1e-3) as here:
            _loop(here, net, lambda _m, o, _s, backward: (backward(), o.step()), parameters=net[2].parameters())
        found.append(weights_of(net))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-12, atol=0)


def test_the_jobs_schedule_is_the_users_own():
    found = []
    for settings in ({}, {"train.schedule": "step", "train.step_epochs": 1, "train.epochs": 3}):
        net = convolution().double()
        with opened(World(), **settings) as here:
            sgd = torch.optim.SGD(net.parameters(), 0.1)
            scheduler = None if settings else torch.optim.lr_scheduler.StepLR(sgd, 1, 0.1)
            model, optimizer, batches = here.prepare(net, sgd, pictures(), batch=17, scheduler=scheduler)
            for _ in here.epochs(3):
                for x, y in batches:
                    here.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                if scheduler:
                    scheduler.step()
        found.append(weights_of(net))
    assert_close(found[1], found[0])


def _precise(world, precision, kind):
    net, losses = convolution(), []
    with opened(world, **{"train.precision": precision, "train.micro_batch": 5}) as here:
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        model, optimizer, batches = here.prepare(net, sgd, pictures(double=False), batch=17)
        for _ in here.epochs(3):
            for x, y in batches:
                output = model(x)
                assert output.dtype == kind
                here.backward(F.cross_entropy(output, y))
                assert all(one.grad is None or one.grad.dtype == torch.float32 for one in net.parameters())
                optimizer.step()
                assert (x[:1, 0] @ x[:1, 0].mT).dtype == kind
            losses.append(here.mean_loss())
        assert (x[:1, 0] @ x[:1, 0].mT).dtype == torch.float32
    return losses


def _in_half_precision(world):
    return [_precise(world, *one) for one in (("bf16", torch.bfloat16), ("fp16", torch.float16))]


def test_the_users_forward_runs_in_the_jobs_precision():
    for found in run_on_ranks(_in_half_precision, 2):
        assert all(losses[-1] < losses[0] for losses in found)


def _frozen(world):
    net = convolution().double()
    net[1].eval()
    start = weights_of(net)
    with manyhands.session(norm_group=4) as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), pictures(), batch=16)
        for _ in here.epochs(2):
            for x, y in batches:
                here.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            here.evaluate(model, pictures())
    return net[1].training, net[0].training, start, weights_of(net)


def test_frozen_layers_stay_frozen():
    frozen, others, start, end = _frozen(None)
    assert others
    assert not frozen
    assert torch.equal(start["1.running_mean"], end["1.running_mean"])
    for *_, weights in run_on_ranks(_frozen, 2):
        assert_close(weights, end)


@pytest.mark.parametrize("fused", [False, True])
def test_weight_decay_moves_no_frozen_parameter(fused):
    net = convolution()
    net[0].requires_grad_(False)
    start = weights_of(net)
    with manyhands.session(norm_group=4) as here:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1, fused=fused)
        model, optimizer, batches = here.prepare(net, optimizer, pictures(double=False), batch=16)
        for x, y in batches:
            here.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    moved = {name for name, one in weights_of(net).items() if not torch.equal(one, start[name])}
    assert moved
    assert not moved & {"0.weight", "0.bias"}


def _left_early(world):
    """A loop that leaves each epoch after two updates; with `epochs`, and with a count of its own."""
    found = []
    for counted in (True, False):
        net, epochs, seen = convolution().double(), [], []
        with opened(world) as here:
            sgd = torch.optim.SGD(net.parameters(), 0.1)
            model, optimizer, batches = here.prepare(net, sgd, pictures(), batch=17)
            assert len(batches) == 4
            for epoch in here.epochs(3) if counted else range(3):
                epochs.append(epoch)
                for number, (x, y) in enumerate(batches):
                    here.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    if not number:
                        seen.append(here.all_reduce(x.sum()).item())
                    if number == 1:
                        break
        found.append((epochs, seen))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_break_from_an_epoch_continues_with_the_next(size):
    (first, *others), *ranks = run_on_ranks(_left_early, size)
    assert all(found == first for answers in (others, *ranks) for found in answers)
    assert first[0] == [0, 1, 2]
    assert len(set(first[1])) == 3


def _losses(folder, *, stop_at=0, leave_at=-1):
    """Trains 3 epochs of 4 updates; each epoch's loss, and the learning rate that follows it."""
    net, found, made = _plain(), {}, 0
    with manyhands.session(out=folder, run__log_every_s=1e-4) as here:
        sgd = torch.optim.SGD(net.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
        model, optimizer, batches = here.prepare(net, sgd, pictures(), batch=16, scheduler=scheduler)
        for epoch in here.epochs(3):
            for x, y in batches:
                here.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                made += 1
                if made == stop_at:
                    signal.raise_signal(signal.SIGTERM)
            loss = here.mean_loss()
            scheduler.step(loss)
            found[epoch] = loss, sgd.param_groups[0]["lr"]
            if epoch == leave_at:
                break
    return found


def test_mean_loss_of_an_epoch_survives_a_resume(tmp_path, capsys):
    whole = _losses(tmp_path / "whole")
    with pytest.raises(SystemExit) as ended:
        _losses(tmp_path / "broken", stop_at=6)
    assert ended.value.code == EXIT_SAVED
    assert "saved at step 6; start the same program again to resume" in capsys.readouterr().err
    assert "stopped" in (tmp_path / "broken" / "report.html").read_text()
    assert _losses(tmp_path / "broken") == {epoch: whole[epoch] for epoch in (1, 2)}


@pytest.mark.slow
def test_who_leaves_early_has_the_last_epoch_saved(tmp_path):
    whole = _losses(tmp_path / "whole")
    assert list(_losses(tmp_path / "left", leave_at=1)) == [0, 1]
    assert "finished" in (tmp_path / "left" / "report.html").read_text()
    assert (tmp_path / "left" / "checkpoints" / "step-00000008").is_dir()
    assert _losses(tmp_path / "left") == {2: whole[2]}


class Slow(nn.Module):
    """Takes a fifth of a second at each call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        time.sleep(0.2)
        return self.inner(x)


def test_a_session_says_first_what_is_trained_and_how_long_an_epoch_is_expected_to_take(capsys):
    net, samples = convolution(), len(pictures())
    with opened(World()) as here:
        here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), pictures(), batch=samples + 1)
    data, network, training, warning = capsys.readouterr().err.splitlines()[:4]
    assert data.startswith(f"manyhands: data: TensorDataset, {samples} training samples, ")
    assert network == f"network: Sequential, {sum(one.numel() for one in net.parameters()):,} parameters"
    assert training.endswith(f"batch {samples}, SGD at learning rate 0.1, processes 1, device cpu")
    assert warning == (
        f"manyhands: each update uses all {samples} training samples, fewer than the batch of {samples + 1}"
    )
    slow = Slow(net)
    modes = [each.training for each in slow.modules()]
    with opened(World()) as here:
        here.prepare(slow, torch.optim.SGD(net.parameters(), 0.1), ConcatDataset([pictures()] * 20), batch=17)
    assert "expected time: " in capsys.readouterr().err
    assert [each.training for each in slow.modules()] == modes


def test_a_plain_mistake_is_said_in_words():
    net = convolution().double()
    with opened(World()) as here:
        with pytest.raises(UserError, match=r"session\.prepare was not called"):
            here.backward(torch.zeros(()))
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), pictures(), batch=17)
        with pytest.raises(UserError, match="outside the loop"):
            optimizer.step()
        with pytest.raises(UserError, match="no run folder"):
            here.save()
        with pytest.raises(UserError, match=r"didn't call session\.backward"):
            list(batches)
        samples = iter(batches)
        x, y = next(samples)
        here.backward(F.cross_entropy(model(x), y))
        with pytest.raises(UserError, match="twice"):
            here.backward(F.cross_entropy(model(x), y))
        with pytest.raises(UserError, match=r"didn't call optimizer.step\(\)"):
            next(samples)
        other = torch.optim.SGD(convolution().parameters(), 0.1)
        with pytest.raises(UserError, match="don't belong to the network"):
            here.prepare(net, other, pictures(), batch=17)


def test_a_network_is_prepared_again_and_an_older_optimizer_refused():
    net = _plain()
    with manyhands.session() as here:
        sgd = torch.optim.SGD(net.parameters(), 0.5)
        model, first, _ = here.prepare(net, sgd, pictures(), batch=16)
        model, optimizer, batches = here.prepare(net, first, pictures(), batch=16)
        before = weights_of(net)
        for x, y in batches:
            here.backward(F.cross_entropy(model(x), y).view(1))
            with pytest.raises(UserError, match="prepare was called again"):
                first.step()
            optimizer.step()
        assert here.mean_loss() > 0
        assert not torch.equal(before["1.weight"], net[1].weight)
        with pytest.raises(UserError, match="a scheduler was created"):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_what_a_session_would_leave_unheard_is_refused(tmp_path):
    with pytest.raises(UserError, match="session has no argument lr"), manyhands.session(lr=0.1):
        pass
    net = _plain()
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    halves = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    with manyhands.session(schedule="cosine", epochs=2) as here:
        with pytest.raises(UserError, match="set the learning rate"):
            here.prepare(net, sgd, pictures(), batch=16, scheduler=halves)
        with pytest.raises(UserError, match='no operation "avg"'):
            here.all_reduce(torch.ones(1), "avg")
        here.prepare(net, sgd, pictures(), batch=16)
        assert math.isnan(here.mean_loss())
    # Weights of some micro-batches only, and a second training in a run folder.
    with manyhands.session(micro_batch=8, out=tmp_path / "run") as here:
        model, _, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.5), pictures(), batch=16)
        with pytest.raises(UserError, match="is for one training run"):
            here.prepare(net, torch.optim.SGD(net.parameters(), 0.5), pictures(), batch=16)
        samples = iter(batches)
        x, y = next(samples)
        here.backward(F.cross_entropy(model(x), y), 8.0)
        x, y = next(samples)
        with pytest.raises(UserError, match="only some"):
            here.backward(F.cross_entropy(model(x), y))


def _freeze(layers):
    layers[2].requires_grad_(False)


def _widen(layers):
    layers[1:3] = nn.Linear(4, 6), nn.Linear(6, 5)


OTHERS = {
    _freeze: "2.weight [5, 5] frozen instead of 2.weight [5, 5]",
    _widen: "1.weight [6, 4] instead of 1.weight [5, 4]",
    list.pop: "nothing instead of 3.weight [3, 5]",
}


def _other_networks(world):
    found, data = [], TensorDataset(torch.arange(32.0).view(8, 4), torch.arange(8) % 3)
    for change in OTHERS:
        layers = [nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
        if world.rank == 1:
            change(layers)
        net = nn.Sequential(*layers)
        with opened(world) as here, pytest.raises(UserError) as caught:
            here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data, batch=4)
        found.append(caught.value.message)
    return found


def test_a_process_that_trains_another_network_is_named_in_place_of_mixing_gradients_up():
    wanted = [f"rank 1's network differs from rank 0's: {other}" for other in OTHERS.values()]
    assert run_on_ranks(_other_networks, 3) == [wanted] * 3


def _copied(world, folder):
    """The network of a session that notes its outputs: copied, pickled, and as it is afterwards."""
    net = _plain()
    with opened(world, folder) as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), pictures(), batch=16)
        average = torch.optim.swa_utils.AveragedModel(net)
        torch.save(net, io.BytesIO())
        for x, y in batches:
            here.backward(F.cross_entropy(model(x), y))
            average(x)
            optimizer.step()
            average.update_parameters(net)
    return len(net._forward_hooks)


@pytest.mark.parametrize("size", [1, 2])
def test_a_network_in_a_session_can_be_copied_and_keeps_nothing_of_it(size, tmp_path):
    assert run_on_ranks(_copied, size, tmp_path) == [0] * size
