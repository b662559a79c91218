"""A checkpoint that is written beside training is of the moment when it was asked for."""

import threading

import pytest
import torch
from torch import nn

from manyhands.checkpoint.write import SaveError
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.saver import SaveOutcome, Saver
from manyhands.train.state import Progress, capture, copied

PATIENCE_S = 60


def test_training_goes_on_while_it_is_written_and_hears_how_it_ended():
    saver, may = Saver(), threading.Event()

    def write():
        assert may.wait(PATIENCE_S)
        return SaveOutcome(digests={"model": "7"})

    saver.begin(7, write)
    assert (saver.step, saver.done) == (7, False)
    may.set()
    assert saver.end() == SaveOutcome(digests={"model": "7"})
    assert saver.step is None


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_an_outcome_and_anything_else_is_raised(background):
    saver = Saver()

    def full():
        raise SaveError("the disk is full")

    saver.begin(1, full, background=background)
    saver.wait()
    assert saver.done
    assert saver.end() == SaveOutcome("the disk is full")

    def broken():
        raise TypeError("not plain data")

    saver.begin(2, broken, background=background)
    saver.wait()
    assert saver.done
    with pytest.raises(TypeError, match="not plain data"):
        saver.end()
    assert saver.step is None


def test_a_process_that_writes_nothing_waits_for_nothing():
    saver = Saver()
    saver.begin(3, None)
    assert (saver.step, saver.done) == (3, False)
    assert saver.end() is None


def test_what_training_changes_afterwards_is_not_in_the_copy():
    network = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=3)

    def loss():
        optimizer.zero_grad()
        value = (network(torch.ones(4, 2)) - 3).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    told = {"rates": [1, 2]}
    before = capture(ParallelNetwork(network), optimizer, Progress(step=1), told)
    texts = str(before)
    optimizer.step(loss)
    optimizer.param_groups[0]["lr"] = 0.5
    told["rates"].append(3)
    assert str(before) == texts
    assert str(capture(ParallelNetwork(network), optimizer, Progress(step=1), told)) != texts


def test_who_keeps_a_copy_has_each_tensor_and_who_does_not_has_none():
    """As FSDP gives it: weights, and beside them the very count that Adam keeps on the CPU."""
    count, weights = torch.tensor(3.0), torch.ones(2)
    given = ({"weight": weights}, {"state": {"weight": {"step": count}}})
    found = copied(given)
    for live in (count, weights):
        live += 1
    assert found[1]["state"]["weight"]["step"] == 3
    assert found[0]["weight"].tolist() == [1, 1]
    assert copied(given, keep=False) == ({"weight": None}, {"state": {"weight": {"step": None}}})
