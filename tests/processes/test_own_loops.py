"""Loops as users write them: where they step, clear, clip and leave, and what a session can't take is said."""

import contextlib
import io
import math
import signal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import EXIT_SAVED, UserError
from tests.processes.ranks import run_on_ranks
from tests.processes.test_session import _data, _network, _session, _weights

PLACES = ("first", "before the optimizer", "last")


def _plain(**_):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


def _loop(here, net, body, *, epochs=1, schedule=None, parameters=None):
    """Trains with what the body does at each micro-batch; the optimizer's last learning rate."""
    sgd = torch.optim.SGD(net.parameters() if parameters is None else parameters, 0.5)
    scheduler = schedule(sgd) if schedule else None
    model, optimizer, batches = here.prepare(net, sgd, _data(), batch=16, scheduler=scheduler)
    for _ in here.epochs(epochs):
        for x, y in batches:
            body(model, optimizer, scheduler, lambda x=x, y=y: here.backward(F.cross_entropy(model(x), y)))
    return sgd.param_groups[0]["lr"]


def _stepped_at(place, micro_batch):
    def body(_model, optimizer, scheduler, backward):
        for name, act in zip(PLACES, (backward, optimizer.step, lambda: None), strict=True):
            if name == place:
                scheduler.step()
            act()

    with manyhands.session(micro_batch=micro_batch) as here:
        return _loop(here, _plain(), body, schedule=lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("micro_batch", [0, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_scheduler_steps_once_an_update_wherever_in_the_loop(place, micro_batch):
    assert _stepped_at(place, micro_batch) == 0.5 * 0.5**4


def _clears(model, optimizer, _scheduler, backward):
    model.zero_grad()
    backward()
    optimizer.step()


def _clips(model, optimizer, _scheduler, backward):
    optimizer.zero_grad()
    backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def _changed(world, body, settings):
    net = _plain() if "precision" not in settings else _plain().float()
    with manyhands.session(**settings) as here:
        try:
            _loop(here, net, body)
        except UserError as error:
            return error.message
    return _weights(net)


@pytest.mark.parametrize("body", [_clears, _clips])
def test_gradients_of_an_unfinished_update_are_not_changed_unnoticed(body):
    assert "changed gradients" in _changed(None, body, {"micro_batch": 5})
    assert isinstance(_changed(None, body, {}), dict)


def test_scaled_gradients_are_not_clipped_unnoticed():
    assert "changed gradients" in _changed(None, _clips, {"precision": "fp16"})


def test_clipping_counts_what_the_optimizer_has():
    found = []
    for frozen in (True, False):
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)).double()
        net.load_state_dict(found[0][1] if found else net.state_dict())
        start = _weights(net)
        net[1].requires_grad_(not frozen)
        with manyhands.session(clip=1e-3) as here:
            _loop(here, net, lambda _m, o, _s, backward: (backward(), o.step()), parameters=net[2].parameters())
        found.append((_weights(net), start))
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], tensor, rtol=1e-12, atol=0)


def test_a_network_is_prepared_again_and_an_older_optimizer_refused():
    net = _plain()
    with manyhands.session() as here:
        sgd = torch.optim.SGD(net.parameters(), 0.5)
        model, first, _ = here.prepare(net, sgd, _data(), batch=16)
        model, optimizer, batches = here.prepare(net, first, _data(), batch=16)
        before = _weights(net)
        for x, y in batches:
            here.backward(F.cross_entropy(model(x), y).view(1))
            with pytest.raises(UserError, match="prepare was called again"):
                first.step()
            optimizer.step()
        assert here.mean_loss() > 0
        assert not torch.equal(before["1.weight"], net[1].weight)
        with pytest.raises(UserError, match="a scheduler was created"):
            torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_a_run_folder_holds_one_training(tmp_path):
    net = _plain()
    with manyhands.session(out=tmp_path / "run") as here:
        here.prepare(net, torch.optim.SGD(net.parameters(), 0.5), _data(), batch=16)
        with pytest.raises(UserError, match="is for one training run"):
            here.prepare(net, torch.optim.SGD(net.parameters(), 0.5), _data(), batch=16)


def test_weights_are_of_all_micro_batches():
    net = _plain()
    with manyhands.session(micro_batch=8) as here:
        model, _, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.5), _data(), batch=16)
        samples = iter(batches)
        x, y = next(samples)
        here.backward(F.cross_entropy(model(x), y), 8.0)
        x, y = next(samples)
        with pytest.raises(UserError, match="only some"):
            here.backward(F.cross_entropy(model(x), y))


def _frozen(world):
    net = _network().double()
    net[1].eval()
    start = _weights(net)
    with manyhands.session(norm_group=4) as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=16)
        for _ in here.epochs(2):
            for x, y in batches:
                here.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            here.evaluate(model, _data())
    return net[1].training, net[0].training, start, _weights(net)


def test_frozen_layers_stay_frozen():
    ((frozen, others, start, end),) = [_frozen(None)]
    assert others
    assert not frozen
    assert torch.equal(start["1.running_mean"], end["1.running_mean"])
    for *_, weights in run_on_ranks(_frozen, 2):
        for name, tensor in end.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)


def _losses(folder, *, stop_at=0, leave_at=-1):
    """Trains 3 epochs of 4 updates; each epoch's loss, and the learning rate that follows it."""
    net, found, made = _plain(), {}, 0
    with manyhands.session(out=folder, run__log_every_s=1e-4) as here:
        sgd = torch.optim.SGD(net.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0)
        model, optimizer, batches = here.prepare(net, sgd, _data(), batch=16, scheduler=scheduler)
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


@pytest.mark.parametrize("stop_at", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_the_mean_loss_of_an_epoch_goes_on_with_it(stop_at, tmp_path, capsys):
    whole = _losses(tmp_path / "whole")
    with pytest.raises(SystemExit) as ended:
        _losses(tmp_path / "broken", stop_at=stop_at)
    assert ended.value.code == EXIT_SAVED
    assert f"saved at step {stop_at}; start the same program again to resume" in capsys.readouterr().err
    assert "stopped" in (tmp_path / "broken" / "report.html").read_text()
    assert _losses(tmp_path / "broken") == {epoch: whole[epoch] for epoch in (1, 2)}


@pytest.mark.slow
def test_who_leaves_early_has_the_last_epoch_saved(tmp_path):
    whole = _losses(tmp_path / "whole")
    assert list(_losses(tmp_path / "left", leave_at=1)) == [0, 1]
    assert "finished" in (tmp_path / "left" / "report.html").read_text()
    assert (tmp_path / "left" / "checkpoints" / "step-00000008").is_dir()
    assert _losses(tmp_path / "left") == {2: whole[2]}


def test_what_a_session_would_leave_unheard_is_refused():
    with pytest.raises(UserError, match="session has no argument lr"), manyhands.session(lr=0.1):
        pass
    net = _plain()
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    halves = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    with manyhands.session(schedule="cosine", epochs=2) as here:
        with pytest.raises(UserError, match="set the learning rate"):
            here.prepare(net, sgd, _data(), batch=16, scheduler=halves)
        with pytest.raises(UserError, match='no operation "avg"'):
            here.all_reduce(torch.ones(1), "avg")
        here.prepare(net, sgd, _data(), batch=16)
        assert math.isnan(here.mean_loss())


def _other_network(world, change):
    layers = [nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
    if world.rank == 1:
        change(layers)
    net = nn.Sequential(*layers)
    data = TensorDataset(torch.arange(32.0).view(8, 4), torch.arange(8) % 3)
    with contextlib.closing(_session(world)) as s, pytest.raises(UserError) as caught:
        s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data, batch=4)
    return caught.value.message


def _freeze(layers):
    layers[2].requires_grad_(False)


def _widen(layers):
    layers[1:3] = nn.Linear(4, 6), nn.Linear(6, 5)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (_freeze, "2.weight [5, 5] frozen instead of 2.weight [5, 5]"),
        (_widen, "1.weight [6, 4] instead of 1.weight [5, 4]"),
        (list.pop, "nothing instead of 3.weight [3, 5]"),
    ],
)
def test_a_process_that_trains_another_network_is_named_in_place_of_mixing_gradients_up(change, other):
    wanted = f"rank 1's network differs from rank 0's: {other}"
    assert run_on_ranks(_other_network, 3, change) == [wanted] * 3


def _copied(world, folder):
    """The network of a session that notes its outputs: copied, pickled, and as it is afterwards."""
    net = _plain()
    with contextlib.closing(_session(world, folder)) as s:
        model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=16)
        average = torch.optim.swa_utils.AveragedModel(net)
        torch.save(net, io.BytesIO())
        for x, y in batches:
            s.backward(F.cross_entropy(model(x), y))
            average(x)
            optimizer.step()
            average.update_parameters(net)
    return len(net._forward_hooks)


@pytest.mark.parametrize("size", [1, 2])
def test_a_network_in_a_session_can_be_copied_and_keeps_nothing_of_it(size, tmp_path):
    assert run_on_ranks(_copied, size, str(tmp_path)) == [0] * size
