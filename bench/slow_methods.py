"""The ways of agreeing that bench.slow_links compares, and the steps between which they agree.

A way is written as "allreduce", "bf16", "powersgd:RANK", "local:CODEC:EVERY:DELAY:RANK" (what is left out at the end
is as usual), or "alone": no agreement at all, which shows what a step costs by itself.
"""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from manyhands.core.world import World
from manyhands.parallel.modes.data import apply
from manyhands.parallel.network import ModeRequest

# Of a virtual step, the part that passes before the first gradient is there.
FORWARD_SHARE = 1 / 3
# Groups of parameters whose gradients become ready one after another in a virtual step.
GROUPS = 8


@dataclass(frozen=True)
class Spec:
    """A way, as it is written on the command line."""

    name: str
    codec: str = "none"
    every: int = 1
    delay: int = 0
    rank: int = 4


def read_spec(text):
    name, *more = text.split(":")
    if name == "local" and more:
        codec, every = more[0], int(more[1])
        delay = int(more[2]) if len(more) > 2 else every * 5 // 6
        return Spec(name, codec, every, delay, int(more[3]) if len(more) > 3 else 4)
    if name == "powersgd" and len(more) <= 1:
        return Spec(name, rank=int(more[0]) if more else 4)
    if name in {"allreduce", "bf16", "alone"} and not more:
        return Spec(name)
    raise ValueError(f"{text} is no way of agreeing: {__doc__}")


class RealStep(nn.Module):
    """From pictures to a loss, on this processor."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, pictures, labels):
        return F.cross_entropy(self.network(pictures), labels)


class VirtualStep(nn.Module):
    """An accelerator's step: so long a sleep, in which gradients made beforehand become ready group by group."""

    def __init__(self, network, seconds):
        super().__init__()
        self.network, self.seconds = network, seconds
        parameters = list(network.parameters())
        generator = torch.Generator().manual_seed(1)
        self.gradients = [torch.randn(one.shape, generator=generator) * 1e-4 for one in parameters]
        share = -(-len(parameters) // GROUPS)
        self.groups = [range(start, min(start + share, len(parameters))) for start in range(0, len(parameters), share)]

    def forward(self, *_):
        time.sleep(self.seconds * FORWARD_SHARE)
        parameters = list(self.network.parameters())
        backward_s = self.seconds * (1 - FORWARD_SHARE) / len(self.groups)
        loss = torch.zeros(())
        for group in self.groups:
            ready = [self.gradients[number] for number in group]
            loss = _Sleeping.apply(backward_s, ready, loss, *(parameters[number] for number in group))
        return loss


class _Sleeping(torch.autograd.Function):
    """Passes a loss on; backward sleeps and then has a group's gradients."""

    @staticmethod
    def forward(ctx, seconds, gradients, loss, *_):
        ctx.seconds, ctx.gradients = seconds, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, outgoing):
        time.sleep(ctx.seconds)
        return None, None, outgoing, *ctx.gradients


class Way:
    """One network, and how its processes agree; this one doesn't."""

    def __init__(self, spec, module, world):
        self.spec, self.module, self.world, self.call = spec, module, world, module
        self.parameters = [one for one in module.parameters() if one.requires_grad]

    def before_update(self, step):
        """`step` updates have been made."""

    def agree(self):
        """All gradients are there."""

    def after_update(self, step):
        """`step` updates have been made."""

    def finish(self):
        """Makes replicas equal, if that isn't so after each step."""

    def payload_bytes(self):
        """What the way itself counts as sent; None where it doesn't."""
        return


class EveryStep(Way):
    """PyTorch's DDP as manyhands uses it, in full precision or with its hook for bfloat16."""

    def __init__(self, spec, module, world):
        super().__init__(spec, module, world)
        self.call = apply(module, world, ModeRequest()).call
        if spec.name == "bf16":
            self.call.register_comm_hook(None, default_hooks.bf16_compress_hook)


class PowerSgdWay(Way):
    def __init__(self, spec, module, world):
        from manyhands.sync.powersgd import PowerSgd
        from manyhands.sync.talk import SyncGroup

        super().__init__(spec, module, world)
        self.peers = SyncGroup(world.rank, world.size)
        self.agreement = PowerSgd(self.parameters, self.peers, rank=spec.rank, seed=0)

    def before_update(self, step):  # noqa: ARG002 - every update is alike
        self.agreement.expect()

    def agree(self):
        self.agreement.average()

    def payload_bytes(self):
        return self.peers.sent_bytes


class LocalWay(Way):
    def __init__(self, spec, module, world):
        from manyhands.sync.buffers import Buffers
        from manyhands.sync.compress import compressor_named
        from manyhands.sync.local import LocalSteps, Pace
        from manyhands.sync.talk import SyncGroup

        super().__init__(spec, module, world)
        self.peers = SyncGroup(world.rank, world.size)
        shapes = [tuple(one.shape) for one in self.parameters]
        compressor = compressor_named(
            spec.codec, shapes, rank=spec.rank, seed=0, device="cpu", dtype=self.parameters[0].dtype
        )
        pace = Pace(spec.every, spec.delay)
        self.steps = LocalSteps(self.parameters, Buffers(averaged(module), self.peers), self.peers, compressor, pace)
        self.made = 0

    def before_update(self, step):
        self.steps.before_update(step)

    def after_update(self, step):
        self.steps.after_update(step)
        self.made = step

    def finish(self):
        self.steps.finish(self.made)

    def payload_bytes(self):
        return self.peers.sent_bytes


def averaged(module):
    """The buffers that are agreed on: BatchNorm's statistics."""
    return [one for one in module.buffers() if one.is_floating_point()]


def make_way(spec, module, world: World):
    kinds = {"allreduce": EveryStep, "bf16": EveryStep, "powersgd": PowerSgdWay, "local": LocalWay, "alone": Way}
    return kinds[spec.name](spec, module, world)
