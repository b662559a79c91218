"""A network cut by a plan, with its loss, outside of a run: gradients of one batch that all processes have."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.mesh import bounds
from manyhands.core.world import World
from manyhands.data.order import sharing
from manyhands.parallel.apply import make_equal
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import MicroBatch, MicroBatchShape, ModeRequest
from manyhands.parallel.on_mesh import NetworkOnMesh
from manyhands.parallel.plan import Plan
from manyhands.parallel.split.network import split
from manyhands.train.loss import BETTER_LOSS, make_loss_fn, something, verify_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def own_rows(network: NetworkOnMesh, rows: Tensor) -> Tensor:
    """This process's rows of a batch that all have; they are the next to be computed."""
    grid = network.grid
    grid.batch = len(rows)
    edges, place = bounds(len(rows), network.share.parts), network.share.index
    return rows[edges[place] : edges[place + 1]]


class CutNetwork(nn.Module):
    """A network of which each process holds and computes its part.

    Every process gives the same whole batches, and takes its own samples of them.

    Attributes:
        inner: the user's network, whose parameters are this process's pieces.
        plan: how it is cut; `plan.layouts` says where each tensor lies.
        network: the same under its plan, for those who look closer.
        world: the processes.
    """

    def __init__(self, model: nn.Module, plan: Plan, sample: Tensor, world: World, loss: Loss | None) -> None:
        super().__init__()
        make_equal(dict(model.state_dict()), world)
        self._loss_fn = make_loss_fn(TrainOptions(label_smoothing=0.0), loss)
        request = ModeRequest(plan=plan, picture=sample, cross_entropy=loss is None, loss=self._loss_fn.own)
        # Its parameters are the user's network's own; the graph that runs them doesn't name them all.
        self.network = network = split(model.train(), world, request)
        self.world, self.plan, self.inner = world, network.traits.plan, model
        if network.loss_axes and network.traits.outputs:
            kind = sample.dtype if sample.is_floating_point() else torch.float32
            self._loss_fn = verify_loss(self._loss_fn, network.traits.outputs, network.traits.outputs, world, kind)
            if self._loss_fn.dependent:
                hints = (BETTER_LOSS, 'or the whole batch on every process: {"loss": "r", …}')
                raise UserError(self._loss_fn.dependent, "loss", hints)
        self._gradients = Gradients(network, world, self._loss_fn)
        self._seed = 0

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        """Computes the gradients of the mean loss over a batch, the same as one process would; returns that loss.

        Args:
            inputs: the whole batch [N, …], equal on all processes.
            labels: int64 [N].
        """
        self._seed += 1
        # What earlier calls have summed already must not be summed once more.
        earlier = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        weigh = self._loss_fn.weigh
        whole = float(len(labels)) if weigh is None else something(weigh(labels.to(self.world.device)))
        if self._loss_fn.is_sum:
            whole = 1.0
        found = self._gradients.forward_backward(self._micro_batch(inputs, labels), whole)
        self._gradients.finish()
        self.network.finish_update()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        total = found.loss.clone() if found.count else torch.zeros_like(found.loss)
        if not self.world.alone:
            dist.all_reduce(total)
        return float(total / whole)

    def full_state_dict(self) -> dict[str, Tensor]:
        """All tensors whole, on the CPU, under the network's own names; a collective."""
        return self.network.full_state_dict()

    def release(self) -> None:
        """Gives the process groups back."""
        self.network.close()

    def _micro_batch(self, inputs: Tensor, labels: Tensor) -> MicroBatch:
        count, network = len(labels), self.network
        share = sharing(count, count, (0, count))
        mine = share(network.share.parts, network.share.index)
        shape = MicroBatchShape(count, count, share, self._seed)
        return MicroBatch(own_rows(network, inputs), own_rows(network, labels), mine, shape)
