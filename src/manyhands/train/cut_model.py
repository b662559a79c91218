"""A network cut by a plan, for training loops of the user's own: `manyhands.parallelize`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.layouts import bounds
from manyhands.core.world import World
from manyhands.data.order import Share, shares_of_pass
from manyhands.parallel.apply import make_equal
from manyhands.parallel.grid import gather_whole
from manyhands.parallel.network import Cutting, How, PassShape
from manyhands.parallel.plan import Plan
from manyhands.parallel.split import split
from manyhands.train.criterion import make_criterion

Loss = Callable[[Tensor, Tensor], Tensor]


class CutModel(nn.Module):
    """A network of which each process holds and computes its part.

    Every process gives the same whole batches, and takes its own samples of them.

    Attributes:
        inner: the user's network, whose parameters are this process's pieces.
        plan: how it is cut; `plan.layouts` says where each tensor lies.
        world: the processes.
    """

    def __init__(self, model: nn.Module, plan: Plan, sample: Tensor, world: World, loss: Loss | None) -> None:
        super().__init__()
        make_equal(dict(model.state_dict()), world)
        network = split(model.train(), world, How(plan=plan, picture=sample, cross_entropy=loss is None))
        cutting = network.cutting
        assert cutting is not None
        self._cutting: Cutting = cutting
        self.world, self.plan = world, cutting.plan
        # Its parameters are the user's network's own; the graph that runs them doesn't name them all.
        self.inner, self._network = model, (network.call,)
        self._judge = cutting.judge(make_criterion(TrainOptions(label_smoothing=0.0), loss), 0.0)
        self._seed = 0

    def train(self, mode: bool = True) -> "CutModel":
        """Training or evaluation, for all modules."""
        self._network[0].train(mode)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Any:
        """All outputs, whole, in evaluation; training goes through `backward`.

        Raises:
            UserError: the model is in training.
        """
        if self.training:
            raise UserError("a cut network trains by model.backward(x, y)", "model(x)", ("model.eval() for outputs",))
        self._cutting.grid.batch = len(inputs)
        return self._network[0](self._own(inputs))

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
        if count < self._cutting.most_parts:
            what = f"{count} sample(s) can't be shared out among {self._cutting.most_parts} processes"
            raise UserError(what, "model.backward(x, y)", ("larger batches", "leave the last, small one out"))
        self._seed += 1
        # What earlier calls have summed already must not be summed once more.
        earlier = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        self._cutting.begin_pass(PassShape(count, count, self._sharing(count), self._seed))
        loss, _, _ = self._judge(self._network[0](self._own(inputs)), self._own(labels))
        (loss / count).backward()
        self._cutting.finish_backward()
        self._cutting.finish_update()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        total = loss.detach().clone() if self._cutting.counts else torch.zeros_like(loss)
        if not self.world.alone:
            dist.all_reduce(total)
        return float(total) / count

    def whole_state_dict(self) -> dict[str, Tensor]:
        """All tensors whole, on the CPU, under the network's own names; a collective."""
        return {
            name: gather_whole(tensor.detach(), self._cutting.layouts[name], self._cutting.grid).cpu()
            for name, tensor in self.inner.state_dict().items()
        }

    def release(self) -> None:
        """Gives the process groups back."""
        self._cutting.release()

    def _own(self, rows: Tensor) -> Tensor:
        edges = bounds(len(rows), self._cutting.replicas)
        return rows[edges[self._cutting.replica] : edges[self._cutting.replica + 1]].to(self.world.device)

    def _sharing(self, count: int) -> Callable[[int, int], Share]:
        return lambda parts, index: shares_of_pass(count, count, (0, count), parts)[index]
