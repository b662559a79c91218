import pytest
import torch

from manyhands.checkpoint.snapshot import Snapshot


@pytest.fixture
def snapshot() -> Snapshot:
    weights = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.zeros(4), "count": torch.tensor(7)}
    optimizer = {
        "state": {"layer.weight": {"momentum_buffer": torch.randn(4, 3)}, "layer.bias": {"step": 3.0}},
        "param_groups": [{"params": ["layer.weight", "layer.bias"], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}],
    }
    return Snapshot(weights, optimizer, {"step": 5, "epoch": 1, "best": {"step": 5, "top1": 0.5}})
