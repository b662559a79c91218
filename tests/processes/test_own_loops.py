"""Loops as users write them: where they step, clear, clip and leave, and what a session can't take is said."""

import functools
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

import manyhands
from manyhands.core.errors import UserError
from manyhands.core.world import World
from tests.processes.ranks import run_on_ranks
from tests.processes.test_session import assert_close, convolution, layers, opened, pictures, weights_of

PLACES = ("first", "before the optimizer", "last")


def _plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


def _steps(_model, optimizer, _scheduler, backward):
    backward()
    optimizer.step()


def _loop(
    here, net, body=_steps, *, epochs=1, schedule=None, parameters=None, data=None, ends=None, leave_at=-1, **how
):
    """Trains with what the body does at each micro-batch, and `ends` after an epoch; the last learning rate."""
    sgd = torch.optim.SGD(net.parameters() if parameters is None else parameters, **{"lr": 0.5, **how})
    scheduler = schedule(sgd) if schedule else None
    model, optimizer, batches = here.prepare(net, sgd, data or pictures(), batch=16, scheduler=scheduler)
    for epoch in here.epochs(epochs):
        for x, y in batches:
            body(model, optimizer, scheduler, lambda x=x, y=y: here.backward(F.cross_entropy(model(x), y)))
        if ends:
            ends(model, scheduler)
        if epoch == leave_at:
            break
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


def _frozen(world):
    net = convolution().double()
    net[1].eval()
    start = weights_of(net)
    with opened(world) as here:
        _loop(here, net, epochs=2, lr=0.1, ends=lambda model, _scheduler: here.evaluate(model, pictures()))
    return net[1].training, net[0].training, start, weights_of(net)


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
                for x, y in itertools.islice(batches, 2):
                    here.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                seen.append(here.all_reduce(x.sum()).item())
        found.append((epochs, seen))
    return found


def _copied(world, folder):
    """The network of a session that notes its outputs: copied, pickled, and as it is afterwards."""
    net, averages = _plain(), []

    def body(_model, optimizer, _scheduler, backward):
        torch.save(net, io.BytesIO())
        averages.append(averages[0] if averages else torch.optim.swa_utils.AveragedModel(net))
        backward()
        averages[0](pictures()[:16][0])
        optimizer.step()
        averages[0].update_parameters(net)

    with opened(world, folder) as here:
        _loop(here, net, body, lr=0.1)
    return len(net._forward_hooks)


WIDER = nn.Linear(36, 6), nn.Linear(6, 5)
OTHERS = {
    "2.weight [5, 5] frozen instead of 2.weight [5, 5]": lambda parts: parts[2].requires_grad_(False),
    "1.weight [6, 36] instead of 1.weight [5, 36]": lambda parts: parts.__setitem__(slice(1, 3), WIDER),
    "nothing instead of 3.weight [3, 5]": list.pop,
}


def _other_networks(world):
    found = []
    for change in () if world.alone else OTHERS.values():
        parts = [nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
        if world.rank == 1:
            change(parts)
        with opened(world) as here, pytest.raises(UserError) as caught:
            _loop(here, nn.Sequential(*parts), data=pictures(double=False))
        found.append(caught.value.message)
    return found


def _unseeded(world):
    """The trained state of a network that each rank initializes otherwise, with buffers of several types."""
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)).double()
    net.to(memory_format=torch.channels_last)
    for kind in (torch.bool, torch.int16, torch.int64, torch.bfloat16):
        net.register_buffer(str(kind).replace(".", "_"), torch.full((2,), world.rank).to(kind))
    net.register_buffer("scalar", torch.tensor(world.rank, dtype=torch.int16))
    with opened(world) as here:
        _loop(here, net)
    return weights_of(net)


def _of_any(world, folder):
    return _left_early(world), _frozen(world), _copied(world, folder), _other_networks(world), _unseeded(world)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By number of processes, and by what is tried: what each process found."""
    folder = tmp_path_factory.mktemp("copied")
    return {size: list(zip(*run_on_ranks(_of_any, size, folder / str(size)), strict=True)) for size in (1, 2)}


def test_break_from_an_epoch_continues_with_the_next(found):
    for size in (1, 2):
        (first, _), *_ = ranks = found[size][0]
        assert all(one == first for answers in ranks for one in answers)
        assert first[0] == [0, 1, 2]
        assert len(set(first[1])) == 3


def test_frozen_layers_stay_frozen(found):
    ((frozen, others, start, end),) = found[1][1]
    assert others
    assert not frozen
    assert torch.equal(start["1.running_mean"], end["1.running_mean"])
    for *_, weights in found[2][1]:
        assert_close(weights, end)


def test_a_network_in_a_session_can_be_copied_and_keeps_nothing_of_it(found):
    assert [*found[1][2], *found[2][2]] == [0, 0, 0]


def test_a_process_that_trains_another_network_is_named_in_place_of_mixing_gradients_up(found):
    wanted = [f"rank 1's network differs from rank 0's: {other}" for other in OTHERS]
    assert found[2][3] == (wanted, wanted)


def test_networks_that_differ_at_the_start_train_as_rank_0s(found):
    (alone,) = found[1][4]
    for weights in found[2][4]:
        assert_close(weights, alone)


def test_clipping_counts_what_the_optimizer_has():
    found = []
    for frozen in (True, False):
        net = nn.Sequential(nn.Flatten(), layers(36, 8, 3))
        net[1][0].requires_grad_(not frozen)
        with manyhands.session(clip=1e-3) as here:
            _loop(here, net, parameters=net[1][2].parameters())
        found.append(weights_of(net))
    assert_close(found[1], found[0], 1e-12)


def test_the_jobs_schedule_is_the_users_own():
    found = []
    for settings in ({}, {"train.schedule": "step", "train.step_epochs": 1, "train.epochs": 3}):
        net = convolution().double()
        schedule = None if settings else lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, 0.1)
        with opened(World(), **settings) as here:
            _loop(here, net, epochs=3, lr=0.1, schedule=schedule, ends=lambda _, own: own and own.step())
        found.append(weights_of(net))
    assert_close(found[1], found[0])


def test_weight_decay_moves_no_frozen_parameter():
    for fused in (False, True):
        net = convolution()
        net[0].requires_grad_(False)
        start = weights_of(net)
        with manyhands.session(norm_group=4) as here:
            _loop(here, net, data=pictures(double=False), momentum=0.9, weight_decay=0.1, fused=fused)
        moved = {name for name, one in weights_of(net).items() if not torch.equal(one, start[name])}
        assert moved
        assert not moved & {"0.weight", "0.bias"}


def _losses(folder, leave_at=-1):
    """Trains 3 epochs of 4 updates; each epoch's loss, and the learning rate that follows it."""
    net, found = _plain(), {}
    with manyhands.session(out=folder) as here:

        def ends(_model, scheduler):
            scheduler.step(loss := here.mean_loss())
            found[len(found)] = loss, scheduler.get_last_lr()

        schedule = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
        _loop(here, net, epochs=3, schedule=schedule, ends=ends, leave_at=leave_at)
    return found


def test_who_leaves_early_has_the_last_epoch_saved(tmp_path):
    whole = _losses(tmp_path / "whole")
    assert len(_losses(tmp_path / "left", leave_at=1)) == 2
    assert "finished" in (tmp_path / "left" / "report.html").read_text()
    assert (tmp_path / "left" / "checkpoints" / "step-00000008").is_dir()
    assert _losses(tmp_path / "left") == {0: whole[2]}


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
