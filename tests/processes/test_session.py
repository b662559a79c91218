"""The user's own loop: collectives, subgroups, and the same updates on any number of processes."""

import contextlib
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.train.session import Session
from tests.processes.ranks import run_on_ranks


def _session(world, folder=None, **settings):
    flags = {"data.name": "objects", "train.norm_group": 4, **settings}
    kept = folder and RunFolder(Path(folder))
    if kept:
        kept.failures.mkdir(parents=True, exist_ok=True)
    return Session(world, load_job(flags, environment={}).job, kept, scheduled="train.schedule" in settings)


def _collectives(world):
    s = _session(world)
    mine = torch.tensor([float(s.rank), 1.0])
    assert s.all_reduce(mine).tolist() == [3.0, 3.0]
    assert s.all_reduce(mine, "mean").tolist() == [1.0, 1.0]
    assert s.all_reduce(mine, "max").tolist() == [2.0, 1.0]
    assert s.all_gather(mine)[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert s.broadcast(mine, source=2).tolist() == [2.0, 1.0]
    rows = torch.arange(6.0).view(3, 2)
    assert s.scatter(rows, source=1).tolist() == rows[s.rank].tolist()
    assert s.reduce_scatter(rows).tolist() == (3 * rows[s.rank]).tolist()
    assert mine.tolist() == [float(s.rank), 1.0]
    s.barrier()
    pair, other = s.new_group([0, 2]), s.new_group([1])
    if s.rank == 1:
        assert other.all_reduce(mine).tolist() == mine.tolist()
        with pytest.raises(UserError, match="not one of ranks 0, 2"):
            pair.all_reduce(mine)
    else:
        assert pair.all_reduce(mine).tolist() == [2.0, 2.0]
        assert pair.rank == (0 if s.rank == 0 else 1)
    with pytest.raises(UserError, match="distinct ranks"):
        s.new_group([0, 3])
    return s.rank, s.size, s.is_main


def test_collectives_and_subgroups_of_three():
    assert run_on_ranks(_collectives, 3) == [(0, 3, True), (1, 3, False), (2, 3, False)]


def _data(double=True):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(53, 1, 6, 6, dtype=torch.float64, generator=generator)
    labels = (images.sum((1, 2, 3)) > 0).long() + (images[:, 0, 0, 0] > 1).long()
    return TensorDataset(images if double else images.float(), labels)


def _network(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)
    )


def _weights(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _own_loop(world, settings):
    s, net, data = _session(world, **settings), _network().double(), _data()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model, optimizer, batches = s.prepare(net, optimizer, data, batch=17)
    losses, seen = [], []
    for _ in s.epochs(3):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            seen.append(len(x))
        losses.append(s.mean_loss())
    found = s.evaluate(model, data)
    s.close()
    return _weights(net), losses, (found.loss, found.count, found.top1), max(seen)


@pytest.fixture(scope="module")
def alone():
    return _own_loop(World(), {})


def _assert_alike(found, wanted, tolerance=1e-9):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance / 1000)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, {"train.micro_batch": 5}),
        (2, {}),
        (2, {"train.micro_batch": 4}),
        (3, {}),
        (3, {"train.micro_batch": 4}),
        (2, {"cluster.shares": [13, 4]}),
    ],
    ids=["1 in parts", "2", "2 in parts", "3", "3 in parts", "2 unequally"],
)
def test_an_own_loop_makes_the_same_updates(alone, size, settings):
    weights, losses, evaluated, _ = alone
    assert evaluated[1] == 53
    assert losses[-1] < losses[0] < 1.2
    for found in run_on_ranks(_own_loop, size, settings):
        _assert_alike(found[0], weights)
        assert found[1] == pytest.approx(losses, rel=1e-9)
        assert found[2] == pytest.approx(evaluated, rel=1e-9)
        assert found[3] <= settings.get("train.micro_batch", 17)


def test_a_session_refuses_measured_shares(alone):
    with pytest.raises(UserError, match="not available in a session"):
        _own_loop(World(0, 2, 0, 2), {"cluster.shares": "auto"})
    _assert_alike(_own_loop(World(), {"cluster.shares": "auto"})[0], alone[0])


def _split_loop(world, ops, mesh, micro_batch):
    s, net, data = _session(world, **{"train.norm_group": "global", "train.micro_batch": micro_batch}), _net2(), _data()
    plan = None if world.alone else {"mesh": mesh, **ops}
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model, optimizer, batches = s.prepare(net, optimizer, data, batch=16, plan=plan)
    losses = []
    for _ in s.epochs(2):
        for x, y in batches:
            optimizer.zero_grad()
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        losses.append(s.mean_loss())
    found, weights = s.evaluate(model, data), s.full_state_dict()
    with pytest.raises(UserError, match="label") if world.alone else contextlib.nullcontext():
        s.evaluate(model, data, classes=1 if world.alone else 0)
    s.close()
    return weights, losses, found.loss


def _net2():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3)).double()


@pytest.mark.parametrize(
    ("size", "mesh", "ops"),
    [
        (2, "dp=2", {"1": "o@dp"}),
        (3, "dp=3", {"1": "o@dp", "3": "i@dp", "loss": "r@dp"}),
        (2, "dp=2", {"3": "o@dp", "loss": "r@dp", "input": "n@dp"}),
    ],
)
def test_a_split_network_is_trained_by_the_users_loop(size, mesh, ops):
    ((weights, losses, evaluated),) = run_on_ranks(_split_loop, 1, ops, mesh, 0)
    for micro_batch in (0, 4):
        for found in run_on_ranks(_split_loop, size, ops, mesh, micro_batch):
            _assert_alike(found[0], weights)
            assert found[1] == pytest.approx(losses, rel=1e-9)
            assert found[2] == pytest.approx(evaluated, rel=1e-9)


def _refused(world):
    with pytest.raises(UserError, match="loss") as caught:
        _split_loop(world, {"3": "o@dp", "loss": "o@dp"}, "dp=2", 0)
    return caught.value.message


def test_classes_of_a_loss_that_the_user_computes_are_not_cut():
    assert len(set(run_on_ranks(_refused, 2))) == 1


def _counted(world, clip, groups):
    """A plain loop that looks at what its optimizer and scheduler do within an update of several micro-batches."""
    s, net = _session(world, **{"train.micro_batch": 4, "train.clip": clip}), _network().double()
    sgd = torch.optim.SGD(net.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)
    model, optimizer, batches = s.prepare(net, sgd, _data(), batch=17, scheduler=scheduler)
    steps, rates, moved = 0, [], []
    for _ in s.epochs(1):
        for x, y in batches:
            before = _weights(net)
            s.backward(F.cross_entropy(model(x), y))
            optimizer.zero_grad()
            optimizer.step()
            scheduler.step()
            steps += 1
            change = [
                (before[n] - p.detach()) / rates[-1] if rates else before[n] - p for n, p in net.named_parameters()
            ]
            moved.append(float(torch.cat([one.detach().flatten() for one in change]).norm()))
            rates.append(optimizer.param_groups[0]["lr"])
    s.close()
    return steps, scheduler.last_epoch, rates[-1], [one for one in moved if one > 0]


@pytest.mark.parametrize("size", [1, 2])
def test_within_an_update_nothing_is_stepped_or_zeroed(size):
    for steps, epochs, rate, moved in run_on_ranks(_counted, size, 1e-3, None):
        assert steps > 4
        assert len(moved) == epochs == 4
        assert rate == pytest.approx(0.5 * 0.1**2)
        assert all(norm <= 1.01e-3 for norm in moved)


def _scheduled(world, own):
    """The job's schedule, and the same one as torch has it."""
    s = _session(world, **({} if own else {"train.schedule": "step", "train.step_epochs": 1, "train.epochs": 3}))
    net = _network().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1) if own else None
    model, optimizer, batches = s.prepare(net, optimizer, _data(), batch=17, scheduler=scheduler)
    for _ in s.epochs(3):
        for x, y in batches:
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        if scheduler:
            scheduler.step()
    s.close()
    return _weights(net)


def test_the_jobs_schedule_is_the_users_own():
    _assert_alike(_scheduled(World(), own=False), _scheduled(World(), own=True))


def _precise(world, precision):
    s, net = _session(world, **{"train.precision": precision, "train.micro_batch": 5}), _network()
    model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(double=False), batch=17)
    kinds, losses = set(), []
    for _ in s.epochs(3):
        for x, y in batches:
            output = model(x)
            kinds.add(output.dtype)
            s.backward(F.cross_entropy(output, y))
            assert all(
                parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in net.parameters()
            )
            optimizer.step()
            assert (x[:1, 0] @ x[:1, 0].mT).dtype == kinds.copy().pop()
        losses.append(s.mean_loss())
    assert (x[:1, 0] @ x[:1, 0].mT).dtype == torch.float32
    s.close()
    return kinds, losses


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_users_forward_runs_in_the_jobs_precision(precision, kind):
    for kinds, losses in run_on_ranks(_precise, 2, precision):
        assert kinds == {kind}
        assert losses[-1] < losses[0]


# 53 samples in batches of 17 are 4 updates an epoch.
class Ended(Exception):  # noqa: N818 - not an error
    """The program is ended."""


def _kept_loop(world, folder, end, settings):
    """Trains for 3 epochs with its own scheduler; saves after update 6 and ends at one of three places."""
    s, net = _session(world, folder, **settings), _network(dropout=0.2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5)
    model, optimizer, batches = s.prepare(net, optimizer, _data(double=False), batch=17, scheduler=scheduler)
    first, updates = None, s._ready().progress
    try:
        for epoch in s.epochs(3):
            first = (epoch, updates.step) if first is None else first
            for x, y in batches:
                s.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if updates.step == 6 and end == "within" and not s._unfinished():
                    s.save()
                    raise Ended
            if (epoch, end) == (1, "at its end"):
                raise Ended
            scheduler.step()
            s.evaluate(model, _data(double=False))
            if (epoch, end) == (1, "after its end"):
                end = "now"
            elif end == "now":
                raise Ended
    except Ended:
        pass
    s.close()
    return first, _weights(net), optimizer.state_dict(), scheduler.state_dict()


@pytest.mark.parametrize("end", ["within", pytest.param("at its end", marks=pytest.mark.slow), "after its end"])
@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {"train.micro_batch": 5}), (2, {}), (3, {"train.precision": "fp16"}), (2, {"parallel.mode": "fsdp"})],
    ids=["1 in parts", "2", "3 fp16", "fsdp"],
)
def test_a_loop_goes_on_to_the_same_bits(size, settings, end):
    settings = {"checkpoint.every": "never" if end == "within" else "4steps", **settings}
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
        undisturbed = run_on_ranks(_kept_loop, size, whole, "", settings)
        run_on_ranks(_kept_loop, size, broken, end, settings)
        resumed = run_on_ranks(_kept_loop, size, broken, "", settings)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert before[0] == (0, 0)
        assert after[0] == {"within": (1, 6), "at its end": (1, 4), "after its end": (2, 8)}[end]
        for name, wanted in before[1].items():
            torch.testing.assert_close(after[1][name], wanted, rtol=0, atol=0)
        assert after[3] == before[3]
        assert after[2]["param_groups"] == before[2]["param_groups"]


def _left_early(world, counted):
    """A loop that leaves each epoch after two updates; with `epochs`, or with a count of its own."""
    s, net = _session(world), _network().double()
    model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=17)
    assert len(batches) == 4
    epochs, seen = [], []
    for epoch in s.epochs(3) if counted else range(3):
        epochs.append(epoch)
        for number, (x, y) in enumerate(batches):
            s.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if not number:
                seen.append(s.all_reduce(x.sum()).item())
            if number == 1:
                break
    s.close()
    return epochs, seen


@pytest.mark.parametrize("size", [1, 2])
def test_who_leaves_an_epoch_early_goes_on_with_the_next(size):
    found = [result for counted in (True, False) for result in run_on_ranks(_left_early, size, counted)]
    assert all(epochs == [0, 1, 2] for epochs, _ in found)
    assert all(seen == found[0][1] for _, seen in found)
    assert len(set(found[0][1])) == 3


def test_a_loop_of_ones_own_says_first_what_is_trained_on(capsys):
    s, net, samples = _session(World()), _network(), len(_data())
    s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=samples + 1)
    s.close()
    data, network, training, warning = capsys.readouterr().err.splitlines()[:4]
    assert data.startswith(f"manyhands: data: TensorDataset, {samples} training samples, ")
    assert network == f"network: Sequential, {sum(one.numel() for one in net.parameters()):,} parameters"
    assert training.endswith(f"batch {samples}, SGD at learning rate 0.1, processes 1, device cpu")
    assert warning == (
        f"manyhands: each update uses all {samples} training samples, fewer than the batch of {samples + 1}"
    )


class Slow(nn.Module):
    """Takes a fifth of a second at each call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, scale=None):
        time.sleep(0.2)
        return self.inner(x) if scale is None else self.inner(x) * scale


def test_a_loop_of_ones_own_says_first_how_long_an_epoch_is_expected_to_take(capsys):
    data = ConcatDataset([_data()] * 20)
    s, net = _session(World()), Slow(_network())
    modes = [each.training for each in net.modules()]
    s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data, batch=17)
    s.close()
    assert "expected time: " in capsys.readouterr().err
    assert [each.training for each in net.modules()] == modes


def test_a_plain_mistake_is_said_in_words():
    s, net = _session(World()), _network().double()
    with pytest.raises(UserError, match=r"session\.prepare was not called"):
        s.backward(torch.zeros(()))
    model, optimizer, batches = s.prepare(net, torch.optim.SGD(net.parameters(), 0.1), _data(), batch=17)
    with pytest.raises(UserError, match="outside the loop"):
        optimizer.step()
    with pytest.raises(UserError, match="no run folder"):
        s.save()
    with pytest.raises(UserError, match=r"didn't call session\.backward"):
        list(batches)
    samples = iter(batches)
    x, y = next(samples)
    s.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UserError, match="twice"):
        s.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UserError, match=r"didn't call optimizer.step\(\)"):
        next(samples)
    other = torch.optim.SGD(_network().parameters(), 0.1)
    with pytest.raises(UserError, match="don't belong to the network"):
        s.prepare(net, other, _data(), batch=17)
