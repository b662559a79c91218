"""One machine's share of an update is timed: the samples that it would have, on the threads that it would have."""

import pytest
import torch
from torch import nn

from manyhands.planner.timing import Others
from manyhands.planner.trial import PlanCase, share_timing


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Whatever else this machine does."""
    monkeypatch.setattr(Others, "share", lambda self: 0.0)


class _Watched(nn.Module):
    """Remembers how many samples it was given, and on how many threads."""

    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.seen = seen

    def forward(self, pictures):
        self.seen.append((len(pictures), torch.get_num_threads()))
        return self.linear(pictures.flatten(1))


def _case(seen, batch, micro_batch=0):
    def loss_fn(logits, labels):
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), logits

    return PlanCase(lambda: _Watched(seen), torch.zeros(3, 2, 2), 5, batch, loss_fn, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("batch", "processes", "micro_batch", "passed"),
    [(24, 3, 0, 8), (25, 3, 0, 9), (24, 3, 4, 4), (24, 3, 100, 8), (3, 3, 0, 2)],
)
def test_the_largest_share_is_timed_or_one_pass_of_it(batch, processes, micro_batch, passed):
    seen, before = [], torch.get_num_threads()
    assert share_timing(_case(seen, batch, micro_batch), processes, before + 1).seconds > 0
    assert set(seen) == {(passed, before + 1)}
    assert torch.get_num_threads() == before


def test_without_a_budget_it_is_timed_once():
    seen = []
    share_timing(_case(seen, 8), 2, budget_s=0.0)
    assert len(seen) == 2
