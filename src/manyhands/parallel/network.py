"""The interface of a network in a parallel mode, used by training, evaluation and checkpoints on each process."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core.mesh import Mesh, TensorLayout, shard_boundaries
from manyhands.core.world import Share, World
from manyhands.parallel.replicas.batch_norm import find_norm_groups

if TYPE_CHECKING:
    from manyhands.parallel.mesh.grid import Grid
    from manyhands.parallel.plan import Plan

# (output, labels int64 [n]) -> (sum [] of losses, logits [n, C])
LossFn = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
LossFnWithLabels = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]  # also the labels of the logits


@dataclass(slots=True)  # not frozen: creation would take three times as long
class MicroBatchShape:
    """The number of samples in a micro-batch over all processes, and their partition into shares."""

    samples: int  # samples of this micro-batch
    batch: int  # samples of the entire update
    share: Callable[[int, int], Share]  # (parts, index) -> the share of process `index` of `parts`
    seed: int = 0  # for random numbers in ops; equal on all processes


@dataclass(slots=True)  # not frozen: creation would take three times as long
class MicroBatch:
    """The samples of one process for one forward and backward pass."""

    inputs: Tensor  # [n, …]; if the share is empty, one sample of weight zero
    labels: Tensor  # int64 [n]
    share: Share  # the position of the samples in the update
    shape: MicroBatchShape  # the micro-batch over all processes
    samples: Tensor | None = None  # int64 [n], indices of the samples in the training split, for messages


def full_batch(inputs: Tensor, labels: Tensor) -> MicroBatch:
    """Returns a micro-batch of all samples of an update, for a single process. BatchNorm sees them as one group."""
    count = len(labels)
    everything = Share(0, count, (), ())
    return MicroBatch(inputs, labels, everything, MicroBatchShape(count, count, lambda _parts, _index: everything))


@dataclass(frozen=True)
class DataShare:
    """How processes share the samples of a micro-batch or of an evaluation batch (block)."""

    parts: int = 1  # processes that get different samples
    index: int = 0  # this process's index among them
    together: bool = False  # all processes compute each micro-batch together; False: each computes its own samples
    most_parts: int = 1  # the most parts into which an op shards the samples
    collective_forward: bool = False  # all processes must call forward equally often, also in evaluation

    def sample_indices(self, block: range) -> list[int]:
        """Returns this process's share of the sample indices `block`, which is first padded to `most_parts` indices."""
        filled = [*block, *[block.start] * (self.most_parts - len(block))]
        edges = shard_boundaries(len(filled), self.parts)
        return filled[edges[self.index] : edges[self.index + 1]]


@dataclass
class NetworkTraits:
    """Properties of a network that depend on its parallel mode."""

    # factor of (this process's sum of losses / global batch): the number of processes for modes that average gradients
    gradient_scale: float = 1.0
    # a context in which backward accumulates gradients without averaging them
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    # connects the loss of an update's last micro-batch to all parameters, also unused ones; None: not needed
    connect_loss: Callable[[Tensor], Tensor] | None = None
    sharded: bool = False  # parameters are torch's DTensors
    orders_sums: bool = False  # the first backward pass determines the order of the sums
    averaging: str = ""  # how gradients are averaged, and why, in a sentence; empty if the mode has no choice
    nonfinite_buffers: frozenset[str] = frozenset()  # names of buffers with infinite or NaN values at the start
    plan: "Plan | None" = None  # the plan by which the network is split
    class_count: int = 0  # the number of classes in the output, if the mode has determined it, otherwise 0
    is_random: bool = False  # an op draws random numbers in training


class Layouts(dict[str, TensorLayout]):
    """{state_dict name: layout of the tensor}, with the mesh and this process's rank. Empty if nothing is sharded."""

    def __init__(self, mesh: Mesh, rank: int, layouts: Mapping[str, TensorLayout]) -> None:
        super().__init__(layouts)
        self.mesh, self.rank = mesh, rank


class ParallelNetwork:
    """A network in a parallel mode. Except in `NetworkOnMesh`, each process computes its own samples.

    Attributes:
        model: the user's network under its own names, for evaluation and checkpoints.
        call: the module to call in training; in some modes its backward averages gradients.
        share: how processes share the samples; by default each process gets different samples.
        norms: the groups of samples that BatchNorm normalizes together, set for each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        call: nn.Module | None = None,
        world: World | None = None,
        traits: NetworkTraits | None = None,
        *,
        share: DataShare | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        world = world or World()
        self.model, self.call = model, model if call is None else call
        self.traits, self.share = traits or NetworkTraits(), share or DataShare(world.size, world.rank)
        self.layouts = Layouts(Mesh((("dp", 1),)), 0, {}) if layouts is None else layouts
        self.norms = find_norm_groups(model)

    def loss_fn(self, loss_fn: LossFn, smoothing: float) -> LossFnWithLabels:  # noqa: ARG002 - for split classes
        """Returns the loss function for `call`'s output, made from the job's loss. `smoothing`: label smoothing."""
        return lambda output, labels: (*loss_fn(output, labels), labels)

    def begin(self, part: MicroBatch) -> tuple[Tensor, Tensor, int]:
        """Starts a micro-batch. Returns (input of `call`, labels, number of samples that this process reports)."""
        share = part.share
        self.norms.begin_micro_batch(share.spans, share.shared_groups, share.count, part.shape.batch)
        return part.inputs, part.labels, share.count

    def finish_gradients(self) -> list[Tensor]:
        """Waits until gradients are synchronized. A collective. Returns flat tensors [n] of all gradients, or []."""
        return []

    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of all gradients of the network, a scalar. A collective if processes hold shards."""
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        return full_tensor(nn.utils.get_total_norm(gradients))

    def finish_update(self) -> None:
        """Updates BatchNorm's running statistics from the samples of all processes. A collective."""
        self.norms.finish_update(self.share.parts)

    def evaluate(
        self, inputs: Tensor, labels: Tensor, count: int, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns (outputs [count, C], labels [count]) of a block of `count` samples. A collective on a mesh.

        `inputs`, `labels`: the block, or on a mesh its `share.sample_indices`. `run(module, inputs)` returns outputs.
        """
        return run(self.model, inputs)[:count], labels

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the state dict, with unsharded tensors on the CPU. A collective if processes hold shards."""
        state = {name: full_tensor(one) for name, one in self.model.state_dict().items()}
        return {name: one.detach().cpu().clone() if isinstance(one, Tensor) else one for name, one in state.items()}

    def close(self) -> None:
        """Releases the process groups, hooks and shared memory of the mode."""


# torch's DTensors, whose constructors are imported late because that takes half a second.


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Any:
    """Returns the unsharded tensor. A collective if `tensor` is a DTensor."""
    if not is_dtensor(tensor):
        return tensor
    # torch crashes if gloo gathers from the memory of an accelerator (pytorch/pytorch#152645).
    gloo = dist.get_backend(tensor.device_mesh.get_group(0)) == "gloo"
    return (tensor.cpu() if gloo else tensor).full_tensor()


def shard_like(value: Tensor, parameter: Any) -> Tensor:
    """Shards `value` like the DTensor `parameter`, without communication. `value` must be equal on all processes."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


@dataclass(frozen=True)
class ModeRequest:
    """Inputs of a parallel mode's `apply(model, world, request)`. A mode uses those that concern it."""

    unused: bool = False  # some parameters may get no gradient
    cross_entropy: bool = True  # the loss is plain cross-entropy, whose classes can be split
    # the user's loss, whose classes can be split if all of its operators have rules
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    plan: "Plan | None" = None  # the sharding of each op, for modes that follow a plan
    picture: Tensor = field(default_factory=lambda: torch.zeros(0))  # one sample, for modes that trace the network
    grid: "Grid | None" = None  # the mesh that the network was constructed with, for networks sharded by hand
    samples: tuple[str, ...] | None = None  # mesh axes that share samples; None: all that shard no parameter
    reduces: bool = True  # False if a sync method averages gradients, for mode `data`
    group: Any = None  # the processes that average in each update, for mode `data`; None: all
    shared_memory: bool = True  # average through shared memory within a machine, for mode `data`
    hook: Any = None  # replaces DDP's mean of gradients, for mode `data`
