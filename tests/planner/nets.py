"""Small networks, and letters and plans drawn at random."""

import random

import torch
from torch import nn

from manyhands.core.mesh import Mesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.strategy import refusal, shorten_strategies
from manyhands.parallel.split.tracing import describe_network


def chain():
    """No two ops read the same, and all lengths are powers of two; pictures have 4 channels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16),
    )  # fmt: skip


def heavy():
    """Nearly all of its weights are fully connected."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(),
        nn.Linear(1024, 2048),
    )  # fmt: skip


def loss_fn_of_sums(output, labels):
    return nn.functional.cross_entropy(output, labels, reduction="sum"), output


def graph_of(model, size=32, channels=3):
    return describe_network(model.train(), torch.zeros(channels, size, size))


def mesh_of(sizes):
    return Mesh(tuple(zip(("dp", "tp", "tp2"), sizes, strict=False)))


def choices_of(one, letters):
    """The assignment of a sketch that stands for letters."""
    return [choices.index(letters[ops[0].name]) for ops, choices in zip(one.groups, one.choices, strict=True)]


def random_letters(graph, mesh, seed):
    """Letters that each op and those that it is tied to can take."""
    letters, rng = {}, random.Random(seed)
    for ops in graph.ops_by_tie().values():
        known = sorted(set.intersection(*[set(op.allowed_letters()) for op in ops]))
        while any(refusal(op, chosen := tuple(rng.choice(known) for _ in mesh.axes), mesh) for op in ops):
            pass
        letters |= dict.fromkeys([op.name for op in ops], chosen)
    return letters


def random_plan(graph, mesh, seed):
    default, ops = shorten_strategies(random_letters(graph, mesh, seed), graph, mesh)
    return Plan(mesh, ops, default)
