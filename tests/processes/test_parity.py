"""The law of the house: N processes make the same updates as one."""

import functools

import pytest
import torch

from tests.processes.ranks import run_on_ranks
from tests.processes.updates import train


@functools.cache
def _alone(updates, norm, settings):
    return run_on_ranks(train, 1, updates, "single", norm, dict(settings))[0]


def _compare(size, updates, mode, norm, settings, tolerance):
    alone = _alone(updates, norm, tuple((key, value) for key, value in settings.items() if key != "cluster.shares"))
    several = run_on_ranks(train, size, updates, mode, norm, settings)
    summed = [sum(losses) for losses in zip(*(result[0] for result in several), strict=True)]
    torch.testing.assert_close(torch.tensor(summed), torch.tensor(alone[0]), rtol=tolerance, atol=0)
    for name, wanted in alone[1].items():
        scale = wanted.abs().max().item() if wanted.is_floating_point() else 1
        # Rank 0 alone gathers a sharded network.
        for result in several if mode != "fsdp" else several[:1]:
            got = result[1][name]
            assert (got - wanted).abs().max().item() <= tolerance * max(scale, 1e-12), name


SETTINGS = {
    "plain": {},
    "accumulation": {"train.micro_batch": 4},
    "large-groups": {"train.norm_group": 16},
    "adamw": {"train.optimizer": "adamw", "train.lr": 0.002},
    "backend": {"parallel.shared_memory": False},
    "bias-rate": {"train.bias_rate": 8.0, "train.decay_norm_and_bias": True},
    "turns": {"data.mirror": "alternate", "data.shift": 2, "data.shift_fill": "reflect"},
    "clip": {"train.clip": 0.1, "train.label_smoothing": 0.1},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm", [False, True], ids=["no-norm", "norm"])
def test_twenty_updates_in_double_precision(size, norm, settings):
    base = {"train.precision": "fp64", "train.channels_last": False, "train.norm_group": 4}
    _compare(size, 20, "data", norm, {**base, **SETTINGS[settings]}, 1e-9)


def test_a_network_that_looks_at_pictures_first():
    _compare(2, 3, "data", True, {"model.name": "quicknet", "train.precision": "fp64", "train.norm_group": 4}, 1e-9)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_update_in_single_precision(size):
    settings = {"train.precision": "fp32", "train.channels_last": False, "train.norm_group": 4}
    _compare(size, 1, "data", True, settings, 1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_parameters_make_the_same_updates(size):
    _compare(
        size, 20, "fsdp", True, {"train.precision": "fp64", "train.channels_last": False, "train.norm_group": 4}, 1e-9
    )


def test_sharded_parameters_go_with_channels_last():
    settings = {
        "train.precision": "fp64",
        "train.norm_group": 4,
        "train.channels_last": True,
    }
    _compare(2, 3, "fsdp", True, settings, 1e-9)


def test_global_groups_are_torchs_synchronised_norm():
    _compare(
        3,
        20,
        "data",
        True,
        {"train.precision": "fp64", "train.channels_last": False, "train.norm_group": "global"},
        1e-9,
    )


# Of 29: much to one, little to another; also cut into passes, and in groups that several processes hold.
UNEQUAL = {2: [22, 7], 3: [20, 1, 8], 4: [3, 17, 5, 4]}


@pytest.mark.parametrize("settings", ["plain", "accumulation", "large-groups", "backend"])
@pytest.mark.parametrize("size", UNEQUAL)
def test_unequal_shares_make_the_same_updates(size, settings):
    base = {
        "train.precision": "fp64",
        "train.channels_last": False,
        "train.norm_group": 4,
        "cluster.shares": UNEQUAL[size],
    }
    _compare(size, 20, "data", True, {**base, **SETTINGS[settings]}, 1e-9)


def test_unequal_shares_of_sharded_parameters_make_the_same_updates():
    settings = {
        "train.precision": "fp64",
        "train.channels_last": False,
        "train.norm_group": 4,
        "cluster.shares": UNEQUAL[3],
    }
    _compare(3, 20, "fsdp", True, settings, 1e-9)


def test_shares_go_with_bf16_gradients_on_the_way():
    """The sum of weighted gradients is the batch's; the method rounds it, so one update is compared coarsely."""
    settings = {
        "train.precision": "fp64",
        "train.channels_last": False,
        "train.norm_group": 4,
        "cluster.shares": UNEQUAL[2],
        "sync.method": "bf16",
    }
    _compare(2, 1, "data", True, settings, 1e-2)
