"""torchvision's classification networks as graphs of ops: whatever can be cut says how, and what can't is named."""

import copy

import pytest
import torch
from tests.models.test_law import ZOO
from tests.processes.test_families import without_draws
from torch import nn
from torchvision import models

from manyhands.core.mesh import Mesh
from manyhands.core.world import World
from manyhands.data.order import equal_shares
from manyhands.parallel.network import MicroBatchShape, ModeRequest
from manyhands.parallel.plan import Plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split.network import shard_by_plan
from manyhands.parallel.split.tracing import describe_network

SAMPLES = 2

FEW = ["squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet"]
# Made of the ops of others of the zoo.
RELATIVES = {*FEW, "inception_v3", "resnet50", "vgg11", "vgg11_bn", "vit_b_16", "vit_h_14"}


def _build(name):
    """A network of the zoo, on pictures as small as it takes; of MaxVit a small one, since its own takes 224 pixels."""
    size = 32 if name == "vit_b_32" else 64
    torch.manual_seed(0)
    if name == "maxvit_t":
        return models.MaxVit((size, size), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=5), size
    how = {"vit_b_32": {"image_size": size}, "googlenet": {"init_weights": False}}.get(name, {})
    return models.get_model(name, weights=None, num_classes=5, **how), size


def _flat(output):
    return [output] if isinstance(output, torch.Tensor) else [one for one in output if one is not None]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in RELATIVES)]
)
def test_a_network_gives_under_a_plan_for_one_process_what_it_gives_by_itself(name):
    """Each op says how it can be cut."""
    model, size = _build(name)
    model = without_draws(model).double().train()
    picture = torch.zeros(3, size, size, dtype=torch.float64)
    pictures = torch.rand(SAMPLES, 3, size, size, dtype=torch.float64)
    alone = copy.deepcopy(model)
    groups, _ = group_batch_norms(alone)
    groups.begin_micro_batch((), (), SAMPLES, SAMPLES)
    with torch.no_grad():
        wanted = [_flat(alone.train(mode)(pictures)) for mode in (True, False)]
    graph = describe_network(copy.deepcopy(model), picture)
    assert [op.name for op in graph.ops.values() if op.letters and not {"n", "r"} & set(op.allowed_letters())] == []
    assert [op.name for op in graph.ops.values() if op.extents and "n" not in op.allowed_letters()] == []
    network = shard_by_plan(model, World(), ModeRequest(plan=Plan(Mesh((("dp", 1),))), picture=picture))
    shares = equal_shares(SAMPLES, 0, (0, SAMPLES), 1)
    network.begin_micro_batch(MicroBatchShape(SAMPLES, SAMPLES, lambda parts, index: shares[index]))
    with torch.no_grad():
        for mode, outputs in zip((True, False), wanted, strict=True):
            got = _flat(network.call.train(mode)(pictures))
            assert len(got) == len(outputs)
            for one, other in zip(got, outputs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Branching(nn.Module):
    """Looks at its numbers, so it can't be looked into."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3


def test_what_lies_around_a_part_that_cant_be_looked_into_is_looked_into_and_notes_say_what_stays_whole():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branching(), nn.ReLU())), nn.Linear(4, 3))
    graph = describe_network(model, torch.zeros(4))
    assert {"0.0", "0.1.0", "0.1.1", "1"} <= set(graph.ops)
    assert graph.ops["0.1.0"].kind == "opaque"
    assert next(note for note in graph.notes if "tracing fails" in note).startswith("0.1.0 is not split")
    text = "\n".join(describe_network(_build("shufflenet_v2_x0_5")[0], torch.zeros(3, 64, 64)).notes)
    assert all(words in text for words in ("chunk", "shard only the batch"))
