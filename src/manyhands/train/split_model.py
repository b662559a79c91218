"""A network cut by a plan, for training loops of the user's own: `manyhands.parallelize`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.order import sharing
from manyhands.parallel.apply import make_equal
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import MicroBatch, MicroBatchShape, ModeRequest
from manyhands.parallel.plan import Plan
from manyhands.parallel.split import split
from manyhands.train.loss import make_loss_fn
from manyhands.train.prove import BETTER_LOSS, settle_loss

Loss = Callable[[Tensor, Tensor], Tensor]


class SplitModel(nn.Module):
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
        self.world, self.plan, self.inner = world, network.plan, model
        if network.loss_axes and network.outputs:
            kind = sample.dtype if sample.is_floating_point() else torch.float32
            self._loss_fn = settle_loss(self._loss_fn, network.outputs, network.outputs, world, kind)
            if self._loss_fn.dependent:
                mend = (BETTER_LOSS, 'or the whole batch on every process: {"loss": "r", …}')
                raise UserError(self._loss_fn.dependent, "loss", mend)
        self._gradients = Gradients(network, world, self._loss_fn)
        self._seed = 0

    def train(self, mode: bool = True) -> "SplitModel":
        """Training or evaluation, for all modules."""
        self.network.call.train(mode)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Any:
        """All outputs, whole, in evaluation; training goes through `backward`.

        Raises:
            UserError: the model is in training.
        """
        if self.training:
            raise UserError("a cut network trains by model.backward(x, y)", "model(x)", ("model.eval() for outputs",))
        return self.network.call(self._own(inputs))

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        """Computes the gradients of the mean loss over a batch, the same as one process would; returns that loss.

        Args:
            inputs: the whole batch [N, …], equal on all processes.
            labels: int64 [N].
        """
        count = len(labels)
        if not self.training or len(inputs) != count:
            what = "in evaluation" if not self.training else f"with {len(inputs)} inputs and {count} labels"
            raise UserError(
                f"backward was called {what}", "model.backward(x, y)", ("model.train()", "a label for each")
            )
        if count < self.network.most_parts:
            what = f"{count} sample(s) can't be shared out among {self.network.most_parts} processes"
            raise UserError(what, "model.backward(x, y)", ("larger batches", "leave the last, small one out"))
        self._seed += 1
        # What earlier calls have summed already must not be summed once more.
        earlier = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        whole = self._loss_fn.divisor(labels.to(self.world.device))
        found = self._gradients.forward_backward(self._micro_batch(inputs, labels), whole)
        self._gradients.finish()
        self.network.finish_update()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        total = found.loss.clone() if found.count else torch.zeros_like(found.loss)
        if not self.world.alone:
            dist.all_reduce(total)
        return float(total / whole)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """All tensors whole, on the CPU, under the network's own names; a collective."""
        return self.network.whole_state_dict()

    def release(self) -> None:
        """Gives the process groups back."""
        self.network.release()

    def _own(self, rows: Tensor) -> Tensor:
        return self.network.own_rows(rows).to(self.world.device)

    def _micro_batch(self, inputs: Tensor, labels: Tensor) -> MicroBatch:
        count, network = len(labels), self.network
        share = sharing(count, count, (0, count))
        mine = share(network.replicas(self.world.size), network.replica(self.world.rank))
        return MicroBatch(self._own(inputs), self._own(labels), mine, MicroBatchShape(count, count, share, self._seed))
