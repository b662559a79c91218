"""A network as one process holds it under a parallel mode: what may be asked of it, whatever the mode."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.utils as nn_utils
from torch import Tensor, nn

from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.core.shares import Share
from manyhands.parallel.norm import NormGroups, norms_of
from manyhands.parallel.spread import full_tensor

if TYPE_CHECKING:
    from manyhands.parallel.grid import Grid
    from manyhands.parallel.plan import Plan

NothingToSync = contextlib.nullcontext

# Of a network's output and labels int64 [n]: the sum [] of losses, and the logits [n, C].
LossFn = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
# The same, and the labels that the logits belong to.
LossFnWithLabels = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class MicroBatchShape:
    """What a network on a mesh must know of a micro-batch before it begins."""

    samples: int  # in this micro-batch, over all processes
    batch: int  # samples in the whole update
    share: Callable[[int, int], Share]  # what process number `index` of `parts` has of the micro-batch
    seed: int = 0  # decides what its ops draw; equal on all processes


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class MicroBatch:
    """What this process has of one forward and backward."""

    inputs: Tensor  # [n, …]; where the share is empty, one sample that counts for nothing
    labels: Tensor  # int64 [n]
    share: Share  # which samples of the update these are
    shape: MicroBatchShape  # the same over all processes


def full_batch(inputs: Tensor, labels: Tensor) -> MicroBatch:
    """An update of one micro-batch on this process alone, whose samples are one group of BatchNorm."""
    count = len(labels)
    everything = Share(0, count, (), ())
    return MicroBatch(inputs, labels, everything, MicroBatchShape(count, count, lambda _parts, _index: everything))


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


@dataclass
class ParallelNetwork:
    """A network as one process holds it under a mode: whole, or sharded by torch. `NetworkOnMesh` is of the others."""

    call: nn.Module  # the module to call in training; its backward averages gradients where the mode does so
    inner: nn.Module  # the user's network under its own names, for evaluation and checkpoints
    # what a process multiplies (its sum of losses / global batch) by, so that the gradients that come out are those of
    # the mean loss over the global batch: the number of processes for modes that average
    gradient_scale: float = 1.0
    # a context in which backward adds up gradients without averaging them, for accumulation
    no_sync: Callable[[], AbstractContextManager[object]] = field(default=NothingToSync)
    collective_forward: bool = False  # True when every process must call forward equally often, also in evaluation
    replicated: bool = True  # True when all processes hold equal parameters, so that they can be compared
    sharded: bool = False  # True when parameters are held as torch's own distributed tensors
    # of the loss of an update's last micro-batch, the same loss, whose backward comes to every parameter, also to those
    # that this micro-batch didn't use; for modes that wait for all
    reach_all: Callable[[Tensor], Tensor] = field(default=_as_it_is)
    endless: frozenset[str] = frozenset()  # names of buffers that held NaN or infinity from the start, and may
    plan: "Plan | None" = None  # what it was split by; None where it wasn't
    # where each entry of the state dict lies; empty where no process holds pieces
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict[str, TensorLayout])
    outputs: int = 0  # how many classes it tells apart, where that is known from splitting it; else 0
    most_parts: int = 1  # into how many parts some op shares out the samples of a micro-batch
    draws: bool = False  # some op is known to draw random numbers in training
    orders_sums: bool = False  # its averaging takes the order of its sums from the first backward pass
    averages: str = ""  # how it averages gradients, and why so, in a sentence; empty where that isn't decided here
    norms: NormGroups = field(init=False)  # what its BatchNorm layers are told of each micro-batch

    # True where all processes compute each batch together, and not each its own samples with a network of its own.
    together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.norms = norms_of(self.inner)

    @property
    def runs_alone(self) -> bool:
        """True where this process holds all parameters, so that it can run `inner` without the others."""
        return not self.sharded

    @property
    def evaluated(self) -> nn.Module:
        """The module to call in evaluation."""
        return self.inner if self.runs_alone else self.call

    @property
    def mesh(self) -> Mesh:
        """The processes that `layouts` speak of, and this one's `rank` among them."""
        return Mesh((("dp", 1),))

    @property
    def rank(self) -> int:
        return 0

    def replicas(self, size: int) -> int:
        """How many of `size` processes are given different samples."""
        return size

    def replica(self, rank: int) -> int:
        """The place among them of this process, number `rank`."""
        return rank

    def saves(self, rank: int) -> bool:
        """Whether process number `rank` writes checkpoints."""
        return rank == 0

    def loss_fn(self, loss_fn: LossFn, smoothing: float) -> LossFnWithLabels:  # noqa: ARG002 - of split classes
        """The loss function for what `call` gives in training; `smoothing` is cross-entropy's."""

        def with_labels(output: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return *loss_fn(output, labels), labels

        return with_labels

    def begin(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """Makes ready for a micro-batch; what `call` is to be given of it, and the labels."""
        share = part.share
        self.norms.begin_micro_batch(share.spans, share.shared_groups, share.count, part.shape.batch)
        return part.inputs, part.labels

    def own_labels(self, labels: Tensor) -> Tensor:
        """The labels of what `call` gives in training here, from those that `begin` gives; for a loss of the user's."""
        return labels

    def full_state_dict(self) -> dict[str, Tensor]:
        """All tensors whole, on the CPU, under the network's own names; a collective where processes hold pieces."""
        state = {name: full_tensor(one) for name, one in self.inner.state_dict().items()}
        return {name: one.detach().cpu().clone() if isinstance(one, Tensor) else one for name, one in state.items()}

    def counted(self, part: MicroBatch, labels: Tensor) -> int:  # noqa: ARG002 - of those who compute the same loss
        """Samples of a loss that this process reports, of `labels` that it has computed it for."""
        return part.share.count

    def finish_gradients(self) -> None:
        """Waits for what backward has not put in place yet; after an update's last backward."""

    def flat_gradients(self) -> list[Tensor]:
        """All of this update's gradients in a few flat tensors [n], where they lie so; else empty."""
        return []

    def finish_update(self, size: int) -> None:
        """Moves BatchNorm's running statistics by what `size` processes saw; a collective."""
        self.norms.finish_update(size)

    def gradient_norm(self) -> Tensor:
        """The 2-norm [] of all gradients of the whole network, whoever holds them; a collective unless all are here."""
        return full_tensor(
            nn_utils.get_total_norm([one.grad for one in self.inner.parameters() if one.grad is not None])
        )

    def first_holder(self, name: str, rank: int) -> int:  # noqa: ARG002 - of pieces
        """The first process that must have the same of a tensor as process number `rank`."""
        return 0

    def gather_rows(self, rows: Tensor, count: int) -> Tensor:  # noqa: ARG002 - where all compute a batch together
        """All `count` samples' rows, of which each replica gives its own, in evaluation; a collective on a mesh."""
        return rows

    def gather_outputs(self, rows: Tensor, count: int) -> Tensor:  # noqa: ARG002
        """All `count` samples' outputs from what `evaluated` gives here; a collective on a mesh."""
        return rows

    def piece(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002 - on a mesh, where names have layouts
        """What this process holds of a whole tensor of the state dict."""
        return tensor

    def release(self) -> None:
        """Gives process groups and hooks back."""


@dataclass(frozen=True)
class ModeRequest:
    """What a mode may need to know to apply itself."""

    unused: bool = False  # True when some parameters may get no gradient
    cross_entropy: bool = True  # the loss is plain cross-entropy, whose classes can be cut
    # the user's own otherwise, whose classes can be cut where all of its small operators have rules
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    plan: "Plan | None" = None  # which part of each op's work each process does, for modes that follow one
    # one sample, whose numbers don't matter, for modes that look into the network
    picture: Tensor = field(default_factory=lambda: torch.zeros(0))
    grid: "Grid | None" = None  # what the network was constructed with, for networks that their author has split
    # names of the mesh's axes over which samples are shared; None: all that cut no parameter
    samples: tuple[str, ...] | None = None
    reduces: bool = True  # False where somebody else averages gradients, for the mode data
    group: Any = None  # the processes that average in each update, for the mode data; None: all
    shared_memory: bool = True  # these may do so through memory where all are on one machine, for the mode data
    hook: Any = None  # what takes the place of a plain mean of gradients in DDP; None for that
