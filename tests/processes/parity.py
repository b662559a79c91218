"""Random plans for small relatives of well-known networks: how far what comes out is from one process's."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import _efficientnet_conf
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from manyhands.config.job import TrainOptions
from manyhands.core.mesh import Mesh, bounds
from manyhands.data.order import shares_of_micro_batch
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import MicroBatch, MicroBatchShape, ModeRequest
from manyhands.parallel.plan import Plan
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split.execute import shard_tensor
from manyhands.parallel.split.network import split
from manyhands.parallel.split.strategy import refusal, shorten_strategies
from manyhands.parallel.split.tracing import describe_network
from manyhands.train.loss import make_loss_fn, verify_loss
from tests.processes.ranks import run_on_ranks

CLASSES = 7
# A gradient below this part of the network's largest one is nothing but rounding (that of a bias before BatchNorm, say)
# and is measured by the largest one.
NOTHING = {torch.float64: 1e-10, torch.float32: 1e-5}


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
BATCH = 8


@dataclass
class Truth:
    """What one process computes: loss, gradients and state of each update, and evaluation's output after the last.

    `loss` is the user's own, of (output, labels): a value for each sample or their mean; None is cross-entropy.
    """

    model: nn.Module
    pictures: torch.Tensor
    labels: torch.Tensor
    group: int
    loss: Callable | None = None
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class Found:
    """How far one plan's results are from the truth, relative to each tensor's largest value.

    Attributes:
        label: the plan's seed (-1 for data parallel), or what it is of.
        first: after one update: (error, what it is of).
        last: after the last one.
    """

    label: object
    first: tuple[float, str]
    last: tuple[float, str]


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def truth(name, updates=1, dtype=torch.float64, group=BATCH, disturbance=0.0):
    """One process's updates; with a relative disturbance of the pictures, to see what rounding alone may do.

    BatchNorm's groups are the whole batch unless said otherwise: over few values its gradients are mostly rounding.
    """
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    pictures = torch.randn(BATCH, 3, size, size, dtype=torch.float64)
    noise = torch.randn(pictures.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return truth_of(model, (pictures * (1 + disturbance * noise)).to(dtype), updates, group, dtype)


def truth_of(model, pictures, updates=1, group=BATCH, dtype=torch.float64, *, loss=None, classes=CLASSES):
    """The same for any network, pictures [n, …] (or whole numbers) and loss."""
    count = len(pictures)
    model = model.to(dtype).train()
    labels = torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(4))
    found = Truth(copy.deepcopy(model), pictures, labels, group, loss)
    groups, _ = group_batch_norms(model)
    optimizer = _optimizer(model)
    for _ in range(updates):
        optimizer.zero_grad()
        (share,) = shares_of_micro_batch(count, group, (0, count), 1)
        groups.begin_micro_batch(share.spans, share.shared_groups, count, count)
        mean = (loss or F.cross_entropy)(model(pictures), found.labels).mean()
        mean.backward()
        _note(found, mean.item(), model, optimizer, lambda: groups.finish_update(1))
    found.output = _evaluate(model, pictures)
    return found


def _evaluate(model, pictures):
    with torch.inference_mode():
        return model.eval()(pictures).clone()


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
    default, ops = shorten_strategies(random_letters(graph, mesh, seed), graph, mesh)
    return Plan(mesh, ops, default)


def _errors(world, cases):
    found = []
    for label, truth, plan in cases:
        own = {"cross_entropy": truth.loss is None, "loss": truth.loss}
        request = ModeRequest(plan=plan, picture=truth.pictures[0], **own)
        network = split(copy.deepcopy(truth.model), world, request)
        mine = _follow(network, truth)
        found.append(Found(label, *_compare_ends(mine, truth, network)))
        network.close()
    return found


def _compare_ends(mine, truth, network):
    layouts = network.layouts

    def piece(name, tensor):
        return shard_tensor(tensor, layouts[name], layouts.mesh, layouts.rank)

    first, last = (_compare(mine, truth, number, piece) for number in (0, len(truth.losses) - 1))
    off = (mine.output.double() - truth.output.double()).abs().max().item() / truth.output.abs().max().item()
    return first, max(last, (off, "output in evaluation"))


def _follow(network, truth):
    optimizer, count = _optimizer(network.model), len(truth.pictures)
    loss_fn, world = make_loss_fn(TrainOptions(label_smoothing=0.0), truth.loss), network.grid.world
    if network.loss_axes and network.traits.outputs:
        outputs = network.traits.outputs
        loss_fn = verify_loss(loss_fn, outputs, outputs, world, truth.pictures.dtype)
        assert not loss_fn.dependent
    gradients = Gradients(network, world, loss_fn)
    network.grid.batch = count
    edges, place = bounds(count, network.share.parts), network.share.index
    mine = slice(edges[place], edges[place + 1])
    found = Truth(network.model, truth.pictures[mine], truth.labels[mine], truth.group)
    share = _share(truth, network.share.parts, network.share.index)
    shape = MicroBatchShape(count, count, lambda parts, index: _share(truth, parts, index))
    for _ in truth.losses:
        optimizer.zero_grad()
        result = gradients.forward_backward(MicroBatch(found.pictures, found.labels, share, shape), count)
        gradients.finish()
        total = result.loss.clone() * (1.0 if result.count else 0.0)
        torch.distributed.all_reduce(total)
        _note(found, total.item() / count, network.model, optimizer, network.finish_update)
    found.output = _evaluate(network.call, found.pictures)
    return found


def _share(truth, parts, index):
    count = len(truth.pictures)
    return shares_of_micro_batch(count, truth.group, (0, count), parts)[index]


def _compare(mine, truth, number, cut):
    """The largest relative error of loss, gradients, buffers and parameters, and where it is."""
    worst = (abs(mine.losses[number] - truth.losses[number]) / abs(truth.losses[number]), "loss")
    nothing = NOTHING[truth.output.dtype]
    for kind, got, wanted in (
        ("gradient of", mine.gradients[number], truth.gradients[number]),
        ("value of", mine.states[number], truth.states[number]),
    ):
        assert set(got) == set(wanted)
        largest = max(one.abs().max().item() for one in wanted.values())
        for name, tensor in wanted.items():
            here, own = cut(name, tensor), tensor.abs().max().item()
            assert here.shape == got[name].shape, name
            difference = (here.double() - got[name].double()).abs()
            if difference.numel():
                error = difference.max().item() / (own if own > nothing * largest else largest)
                worst = max(worst, (error, f"{kind} {name}"))
    return worst


def errors(name, axes, seeds, updates=1, dtype=torch.float64, group=BATCH):
    """The worst of all processes for random plans of one of the networks."""
    wanted = truth(name, updates, dtype, group)
    mesh = Mesh(axes)
    return errors_of([(seed, wanted, random_plan(wanted.model, wanted.pictures[0], mesh, seed)) for seed in seeds])


def errors_of(cases):
    """The worst of all processes for (label, truth, plan), all on one mesh."""
    by_rank = run_on_ranks(_errors, cases[0][2].mesh.size, cases)
    return [
        Found(ranks[0].label, max(one.first for one in ranks), max(one.last for one in ranks))
        for ranks in zip(*by_rank, strict=True)
    ]


def rounding(name, updates=1, group=BATCH):
    """How far one process is from itself when its pictures are disturbed in their last digit: no plan can do better."""
    wanted, other = truth(name, updates, group=group), truth(name, updates, group=group, disturbance=2e-16)
    compared = [_compare(other, wanted, number, lambda _, tensor: tensor) for number in (0, updates - 1)]
    return Found(0, *compared)
