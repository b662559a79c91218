"""Networks that the processes of a mesh compute together, each a shard."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from manyhands.core.mesh import TensorLayout
from manyhands.parallel.mesh.grid import Grid
from manyhands.parallel.mesh.placement import Extent, Layout, convert, gather_full
from manyhands.parallel.mesh.reduce import Reducer, total_norm
from manyhands.parallel.network import DataShare, Layouts, MicroBatch, MicroBatchShape, NetworkTraits, ParallelNetwork


class NetworkOnMesh(ParallelNetwork):
    """A network whose processes compute each micro-batch together.

    `layouts` has the layout of each parameter and buffer by name. `axes` are (indices of the mesh axes that shard the
    samples of the input, those that shard the samples of the loss). `most_parts`: the most shards of samples in an op.
    """

    full_outputs = False  # True if evaluation returns the outputs of all samples on each process

    def __init__(
        self,
        model: nn.Module,
        call: nn.Module,
        grid: Grid,
        layouts: Mapping[str, TensorLayout],
        axes: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        most_parts: int,
        traits: NetworkTraits,
    ) -> None:
        input_axes, loss_axes = axes
        self.grid, self.loss_axes = grid, loss_axes
        self.reducer = Reducer(dict(model.named_parameters()), layouts, grid)
        traits.no_sync = self.reducer.no_sync
        parts, index = grid.parts(input_axes), grid.place(input_axes)
        share = DataShare(parts, index, together=True, most_parts=most_parts, collective_forward=True)
        super().__init__(model, call, traits=traits, share=share, layouts=Layouts(grid.mesh, grid.world.rank, layouts))
        every = range(len(grid.mesh.axes))
        self._input: Layout = tuple(0 if axis in input_axes else "R" for axis in every)
        self._loss: Layout = tuple(0 if axis in loss_axes else "R" for axis in every)
        self._everywhere: Layout = tuple("R" for _ in every)
        # One of the processes that compute the loss of the same samples reports it.
        self._reports = grid.first([axis for axis in every if axis not in loss_axes])

    @abstractmethod
    def begin_micro_batch(self, shape: MicroBatchShape) -> None:
        """Prepares the network for the next micro-batch. Called on every process."""

    @override
    def begin(self, part: MicroBatch) -> tuple[Tensor, Tensor, int]:
        self.begin_micro_batch(part.shape)
        # A share without samples stays empty, because it must fit the shards on other processes.
        inputs, labels = part.inputs[: part.share.count], part.labels[: part.share.count]
        labels = self._converted(labels, self._loss, len(labels))
        return inputs, labels, len(labels) if self._reports else 0

    @override
    def finish_gradients(self) -> list[Tensor]:
        self.reducer.finish()
        return []

    @override
    def gradient_norm(self) -> Tensor:
        return total_norm(dict(self.model.named_parameters()), self.layouts, self.grid)

    @override
    def evaluate(
        self, inputs: Tensor, labels: Tensor, count: int, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        filled = max(count, self.share.most_parts)
        self.grid.batch = filled
        labels = self._converted(labels, self._everywhere, filled)
        outputs = run(self.call, inputs)
        if not self.full_outputs:
            outputs = self._converted(outputs, self._everywhere, filled)
        return outputs[:count], labels[:count]

    def _converted(self, rows: Tensor, target: Layout, count: int) -> Tensor:
        """Converts one row per sample from the input's layout to `target`. `count`: samples over all processes."""
        return convert(rows, self._input, target, Extent((count,), 1), self.grid)

    @override
    def full_state_dict(self) -> dict[str, Any]:
        return {
            name: gather_full(one.detach(), self.layouts[name], self.grid).cpu() if isinstance(one, Tensor) else one
            for name, one in self.model.state_dict().items()
        }

    @override
    def close(self) -> None:
        self.reducer.release()
        self.grid.release()
