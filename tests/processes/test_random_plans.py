"""A sample of random plans for small relatives of well-known networks: one process's results come out.

More of them were run once: the table is in docs/experiments/parallel.md.
"""

import pytest
import torch

from tests.processes.parity import NETWORKS, errors

TWO, FOUR = (("dp", 2),), (("dp", 4),)
SQUARE, CUBE = (("dp", 2), ("tp", 2)), (("dp", 2), ("tp", 2), ("tp2", 2))
QUICK = ("vgg", "vit", "resnet18")
FAST = [(name, TWO, 1) for name in QUICK] + [("vgg", SQUARE, 3), ("vgg", CUBE, 1), ("vit", FOUR, 1)]
FAST += [("vit", SQUARE, 1), ("resnet18", SQUARE, 1)]
SLOW = [(name, TWO, 1) for name in NETWORKS if name not in QUICK]
SLOW += [(name, mesh, 3) for name in ("vgg", "vit") for mesh in (TWO, FOUR, SQUARE)]
SLOW += [("resnet18", TWO, 3), ("resnet18", SQUARE, 3), ("efficientnet_b0", TWO, 3), ("convnext", SQUARE, 3)]


def _name(value):
    return "x".join(str(size) for _, size in value) if isinstance(value, tuple) else str(value)


def _check(found, tolerance):
    for one in found:
        for error, what in (one.first, one.last):
            assert error <= tolerance, f"plan {one.label}: {what} is off by {error:.1e}"


@pytest.mark.parametrize(("name", "axes", "plans"), FAST, ids=_name)
def test_random_plans_make_the_updates_of_one_process(name, axes, plans):
    _check(errors(name, axes, range(plans), updates=2), 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "axes", "plans"), SLOW, ids=_name)
def test_more_random_plans_make_five_updates_of_one_process(name, axes, plans):
    _check(errors(name, axes, range(100, 100 + plans), updates=5), 1e-9)


def test_groups_of_batch_norm_may_be_smaller_than_the_batch():
    _check(errors("vgg", SQUARE, range(10, 14), updates=2, group=4), 1e-9)


@pytest.mark.parametrize(("name", "axes"), [("vgg", SQUARE), ("vit", SQUARE), ("resnet18", TWO)], ids=_name)
@pytest.mark.slow
def test_random_plans_in_single_precision(name, axes):
    _check(errors(name, axes, range(20, 22), dtype=torch.float32), 1e-4)
