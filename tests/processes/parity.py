"""One process's updates of a network, and how far those of several processes under a plan are from them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import _efficientnet_conf
from torchvision.models.resnet import BasicBlock, ResNet

from manyhands.config.job import TrainOptions
from manyhands.core.mesh import shard_boundaries
from manyhands.data.order import equal_shares
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import MicroBatch, MicroBatchShape, ModeRequest
from manyhands.parallel.replicas.batch_norm import group_batch_norms
from manyhands.parallel.split.execute import shard_tensor
from manyhands.parallel.split.network import shard_by_plan
from manyhands.parallel.split.tracing import describe_network
from manyhands.train.loss import make_loss_fn, verify_loss
from tests.processes.ranks import run_on_ranks

CLASSES = 7
# A gradient below this part of the network's largest one is nothing but rounding (that of a bias before BatchNorm, say)
# and is measured by the largest one.
NOTHING = {torch.float64: 1e-10, torch.float32: 1e-5}


class NarrowResNet(ResNet):
    """A ResNet with an eighth of the channels and a block of each kind."""

    def __init__(self):
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.fc = nn.Linear(512 // 8, CLASSES)

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        return super()._make_layer(block, planes // 8, blocks, stride, dilate)


def _vgg():
    def block(before, after):
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 6), *block(6, 10), nn.Flatten(), nn.Linear(10 * 64, 20), nn.ReLU(), nn.Linear(20, CLASSES)
    )


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
    "resnet": (NarrowResNet, 64),
    "efficientnet_b0": (_efficientnet, 64),
    "convnext": (_convnext, 64),
    "densenet": (_densenet, 64),
    "vit": (_vit, 32),
}
BATCH = 8


@dataclass
class Truth:
    """What one process computes: loss, gradients and state of each update, and evaluation's output after the last.

    `make` builds the network, on each process anew; `loss` is the user's own, of (output, labels): a value for each
    sample or their mean; None is cross-entropy.
    """

    make: Callable[[], nn.Module]
    pictures: torch.Tensor
    labels: torch.Tensor
    group: int
    loss: Callable | None = None
    updates: list[tuple[float, dict, dict]] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def network(self):
        torch.manual_seed(0)
        return self.make().to(self.pictures.dtype if self.pictures.is_floating_point() else torch.float64).train()

    def graph(self):
        network = self.network()
        group_batch_norms(network)
        return describe_network(network, self.pictures[0])

    def share(self, parts, index):
        return equal_shares(len(self.pictures), self.group, (0, len(self.pictures)), parts)[index]


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def truth_of(make, pictures, updates=1, group=BATCH, *, loss=None, classes=CLASSES):
    """One process's updates of a network on pictures [n, …] (or whole numbers)."""
    count = len(pictures)
    labels = torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(4))
    found = Truth(make, pictures, labels, group, loss)
    model = found.network()
    groups, _ = group_batch_norms(model)
    optimizer = _optimizer(model)
    for _ in range(updates):
        optimizer.zero_grad()
        share = found.share(1, 0)
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
    gradients = {key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None}
    optimizer.step()
    finish()
    state = {key: one.detach().clone() for key, one in model.state_dict().items()}
    found.updates.append((loss, gradients, state))


def _errors(world, cases):
    """By case: the largest relative error after the first update or the last one, and where it is."""
    found = []
    for _, truth, plan in cases:
        own = {"cross_entropy": truth.loss is None, "loss": truth.loss}
        network = shard_by_plan(truth.network(), world, ModeRequest(plan=plan, picture=truth.pictures[0], **own))
        mine = _follow(network, truth)
        off = (mine.output.double() - truth.output.double()).abs().max().item() / truth.output.abs().max().item()
        least = NOTHING[truth.output.dtype]
        ends = (_compare(mine.updates[end], truth.updates[end], least, network.layouts) for end in (0, -1))
        found.append(max(*ends, (off, "output in evaluation")))
        network.close()
    return found


def _follow(network, truth):
    optimizer, count = _optimizer(network.model), len(truth.pictures)
    loss_fn, world = make_loss_fn(TrainOptions(label_smoothing=0.0), truth.loss), network.grid.world
    if network.loss_axes and network.traits.class_count:
        outputs = network.traits.class_count
        loss_fn = verify_loss(loss_fn, outputs, outputs, world, truth.pictures.dtype)
        assert not loss_fn.dependence_reason
    gradients = Gradients(network, world, loss_fn)
    network.grid.batch = count
    edges, place = shard_boundaries(count, network.share.parts), network.share.index
    mine = slice(edges[place], edges[place + 1])
    found = Truth(truth.make, truth.pictures[mine], truth.labels[mine], truth.group)
    share, shape = truth.share(network.share.parts, place), MicroBatchShape(count, count, truth.share)
    for _ in truth.updates:
        optimizer.zero_grad()
        result = gradients.forward_backward(MicroBatch(found.pictures, found.labels, share, shape), count)
        gradients.finish()
        total = result.loss.clone() * (1.0 if result.count else 0.0)
        torch.distributed.all_reduce(total)
        _note(found, total.item() / count, network.model, optimizer, network.finish_update)
    found.output = _evaluate(network.call, found.pictures)
    return found


def _compare(mine, truth, least, layouts):
    """The largest relative error of loss, gradients, buffers and parameters, and where it is."""
    worst = (abs(mine[0] - truth[0]) / abs(truth[0]), "loss")
    for kind, got, wanted in zip(("gradient of", "value of"), mine[1:], truth[1:], strict=True):
        assert set(got) == set(wanted)
        largest = max(one.abs().max().item() for one in wanted.values())
        for name, tensor in wanted.items():
            here = shard_tensor(tensor, layouts[name], layouts.mesh, layouts.rank)
            own = tensor.abs().max().item()
            assert here.shape == got[name].shape, name
            difference = (here.double() - got[name].double()).abs()
            if difference.numel():
                error = difference.max().item() / (own if own > least * largest else largest)
                worst = max(worst, (error, f"{kind} {name}"))
    return worst


def assert_as_one_process(cases, tolerance):
    """Each case, (label, truth, plan), on as many processes as its mesh has; all have one mesh."""
    for rank, errors in enumerate(run_on_ranks(_errors, cases[0][2].mesh.size, cases)):
        for (label, *_), (error, where) in zip(cases, errors, strict=True):
            assert error <= tolerance, f"{label} on rank {rank}: {where} is off by {error:.1e}"
