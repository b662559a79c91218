"""Random plans for small relatives of well-known networks: how far what comes out is from one process's."""

import copy
import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import _efficientnet_conf
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from manyhands.core.layouts import bounds
from manyhands.core.mesh import Mesh
from manyhands.data.order import shares_of_pass
from manyhands.parallel.describe import describe_network
from manyhands.parallel.execute import cut_tensor
from manyhands.parallel.network import How, PassShape
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.plan import Plan, concise, refusal
from manyhands.parallel.split import split
from tests.processes.ranks import run_on_ranks

CLASSES = 7
# Gradients far below the network's largest one (a bias before BatchNorm has none at all) are compared with this part.
SMALLEST = 1e-4


class NarrowResNet(ResNet):
    """A ResNet with an eighth of the channels."""

    def __init__(self, block, layers):
        super().__init__(block, layers)
        self.fc = nn.Linear(512 // 8 * block.expansion, CLASSES)

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        return super()._make_layer(block, planes // 8, blocks, stride, dilate)


def _vgg():
    def block(before, after):
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]

    return nn.Sequential(
        *block(3, 6), nn.MaxPool2d(2), *block(6, 10), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(10 * 64, 20),
        nn.ReLU(), nn.Linear(20, CLASSES),
    )  # fmt: skip


def _efficientnet():
    setting, last = _efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.4)
    return models.EfficientNet(setting, 0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=last)


def _convnext():
    setting = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, 32, 2), CNBlockConfig(32, None, 1)]
    # Layer scales of 1e-6, as it begins with, would hide what the blocks do.
    return models.ConvNeXt(setting, layer_scale=0.5, num_classes=CLASSES)


def _densenet():
    return models.DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=CLASSES)


def _vit():
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=24, num_classes=CLASSES
    )


# How each is built, and the size of its pictures.
NETWORKS = {
    "vgg": (_vgg, 32),
    "resnet18": (lambda: NarrowResNet(BasicBlock, [2, 2, 2, 2]), 64),
    "resnet50": (lambda: NarrowResNet(Bottleneck, [2, 2, 2, 2]), 64),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(width_mult=0.5, num_classes=CLASSES, dropout=0.0), 64),
    "efficientnet_b0": (_efficientnet, 64),
    "convnext": (_convnext, 64),
    "densenet": (_densenet, 64),
    "vit": (_vit, 32),
}
# Groups of BatchNorm and the batch are those of the whole batch, so that few values never stand alone.
BATCH = 8


@dataclass
class Truth:
    """What one process computes: losses of each update, gradients of the first and last, and the state after both."""

    model: nn.Module
    pictures: torch.Tensor
    labels: torch.Tensor
    group: int
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)


@dataclass
class Found:
    """How far one plan's results are from the truth, relative to each tensor's largest value.

    Attributes:
        seed: of the plan; -1 for data parallel.
        first: after one update: (error, what it is of).
        last: after the last one.
    """

    seed: int
    first: tuple[float, str]
    last: tuple[float, str]


def _criterion(output, labels):
    return F.cross_entropy(output, labels, reduction="sum"), output


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def truth(name, updates=1, dtype=torch.float64, group=BATCH, disturbance=0.0):
    """One process's updates; with a relative disturbance of the pictures, to see what rounding alone may do."""
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    model = build().to(dtype).train()
    pictures = torch.randn(BATCH, 3, size, size, dtype=torch.float64)
    noise = torch.randn(pictures.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    pictures = (pictures * (1 + disturbance * noise)).to(dtype)
    found = Truth(copy.deepcopy(model), pictures, torch.randint(0, CLASSES, (BATCH,)), group)
    groups, _ = group_batch_norms(model)
    optimizer = _optimizer(model)
    for _ in range(updates):
        optimizer.zero_grad()
        (share,) = shares_of_pass(BATCH, group, (0, BATCH), 1)
        groups.begin_pass(share.spans, share.shared_groups, BATCH, BATCH)
        loss, _ = _criterion(model(pictures), found.labels)
        (loss / BATCH).backward()
        _note(found, loss.item(), model, optimizer, lambda: groups.finish_update(1))
    return found


def _note(found, loss, model, optimizer, finish):
    found.losses.append(loss)
    found.gradients.append({key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None})
    optimizer.step()
    finish()
    found.states.append({key: one.detach().clone() for key, one in model.state_dict().items()})


def random_letters(graph, mesh, seed):
    """Letters for each op, any that it may take; seed -1 is data parallel."""
    chance = random.Random(seed)
    letters = {}
    for ops in graph.ties().values():
        common = set.intersection(*[set(op.allowed()) for op in ops if op.letters] or [{"n"}])
        while True:
            chosen = tuple("n" if seed < 0 else chance.choice(sorted(common)) for _ in mesh.axes)
            if not any(refusal(op, chosen, mesh) for op in ops if op.letters):
                break
        letters |= {op.name: chosen for op in ops}
    return letters


def random_plan(model, picture, mesh, seed):
    """A plan in the words of a plan.json."""
    model = copy.deepcopy(model).train()
    group_batch_norms(model)
    graph = describe_network(model, picture)
    default, ops = concise(random_letters(graph, mesh, seed), graph, mesh)
    return Plan(mesh, ops, default)


def _errors(world, truth, axes, seeds):
    mesh = Mesh(axes)
    found = []
    for seed in seeds:
        plan = random_plan(truth.model, truth.pictures[0], mesh, seed)
        model = copy.deepcopy(truth.model)
        network = split(model, world, How(plan=plan, picture=truth.pictures[0]))
        mine = _follow(network, truth, world)
        found.append(Found(seed, *_compare_ends(mine, truth, network.cutting)))
        network.cutting.release()
    return found


def _compare_ends(mine, truth, cutting):
    def cut(name, tensor):
        return cut_tensor(tensor, cutting.layouts[name], cutting.grid)

    return [_compare(mine, truth, number, cut) for number in (0, len(truth.losses) - 1)]


def _follow(network, truth, world):
    cutting, optimizer = network.cutting, _optimizer(network.inner)
    judge = cutting.judge(_criterion, 0.0)
    edges = bounds(BATCH, cutting.replicas)
    mine = slice(edges[cutting.replica], edges[cutting.replica + 1])
    found = Truth(network.inner, truth.pictures[mine], truth.labels[mine], truth.group)
    for _ in truth.losses:
        optimizer.zero_grad()
        share = lambda parts, index: shares_of_pass(BATCH, truth.group, (0, BATCH), parts)[index]  # noqa: E731
        cutting.begin_pass(PassShape(BATCH, BATCH, share))
        loss, _, _ = judge(network.call(found.pictures), found.labels)
        (loss / BATCH).backward()
        cutting.finish_backward()
        total = loss.detach().clone() * (1.0 if cutting.counts else 0.0)
        torch.distributed.all_reduce(total)
        _note(found, total.item(), network.inner, optimizer, cutting.finish_update)
    return found


def _compare(mine, truth, number, cut):
    """The largest relative error of loss, gradients, buffers and parameters, and where it is."""
    worst = (abs(mine.losses[number] - truth.losses[number]) / abs(truth.losses[number]), "loss")
    floor = SMALLEST * max(one.abs().max().item() for one in truth.gradients[number].values())
    for kind, got, wanted, least in (
        ("gradient of", mine.gradients[number], truth.gradients[number], floor),
        ("value of", mine.states[number], truth.states[number], SMALLEST),
    ):
        assert set(got) == set(wanted)
        for name, tensor in wanted.items():
            here = cut(name, tensor)
            assert here.shape == got[name].shape, name
            difference = (here.double() - got[name].double()).abs()
            error = difference.max().item() / max(tensor.abs().max().item(), least) if difference.numel() else 0.0
            worst = max(worst, (error, f"{kind} {name}"))
    return worst


def errors(name, axes, seeds, updates=1, dtype=torch.float64, group=BATCH):
    """The worst of all processes for each plan."""
    wanted = truth(name, updates, dtype, group)
    by_rank = run_on_ranks(_errors, Mesh(axes).size, wanted, axes, seeds)
    return [
        Found(ranks[0].seed, max(one.first for one in ranks), max(one.last for one in ranks))
        for ranks in zip(*by_rank, strict=True)
    ]


def rounding(name, updates=1, group=BATCH):
    """How far one process is from itself when its pictures are disturbed in their last digit: no plan can do better."""
    wanted, other = truth(name, updates, group=group), truth(name, updates, group=group, disturbance=2e-16)
    compared = [_compare(other, wanted, number, lambda _, tensor: tensor) for number in (0, updates - 1)]
    return Found(0, *compared)
