"""Lists the collectives of one update (optimizer step) of a sharded network, as they run in training."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from manyhands.core.mesh import Mesh
from manyhands.core.world import Share
from manyhands.data.order import BatchSharing
from manyhands.parallel.mesh.placement import Extent, Layout, conversion_collectives, value_layout
from manyhands.parallel.mesh.reduce import gradient_sum_axes, make_buckets
from manyhands.parallel.replicas.batch_norm import GroupedNorm
from manyhands.parallel.split.execute import Letters, batch_axes, input_layouts, output_layouts, parameter_layouts
from manyhands.parallel.split.graph import INPUT, LOSS, Graph, Op
from manyhands.planner.links import MeshLinks

FORWARD, BACKWARD, GRADIENTS, STATISTICS = "forward", "backward", "gradients", "statistics"
_LONG_BYTES = 8  # size of labels, and of values in BatchNorm's sums
_FLOAT_BYTES = 4

ShareOf = Callable[[int, int], Share]


@dataclass(frozen=True)
class Collective:
    """One collective operation, with its size and group."""

    kind: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    axes: tuple[int, ...]  # mesh axes of its group that are longer than one
    values: int  # count on each process before the operation; for all_gather, of the padded shard
    item_bytes: int
    when: str  # forward, backward, gradients or statistics
    op: str = ""  # the op that causes it; empty: several ops

    def whole_bytes(self, mesh: Mesh) -> int:
        """Returns the bytes of the tensor before sharding, from which `MeshLinks` computes times."""
        return self.values * self.item_bytes * (mesh.shard_count(self.axes) if self.kind == "all_gather" else 1)

    def seconds(self, links: MeshLinks) -> float:
        return links.seconds(self.kind, self.axes, self.whole_bytes(links.mesh))

    def work_seconds(self, links: MeshLinks) -> float:
        """Returns the seconds in which the collective keeps the CPU cores from computing."""
        return links.work_seconds(self.kind, self.axes, self.whole_bytes(links.mesh))


@dataclass(frozen=True)
class PlannedUpdate:
    """The inputs that determine the collectives of one update of a sharded network."""

    graph: Graph  # of the unsharded network in training
    letters: Letters  # by op, a letter per mesh axis, such as n: sharded by samples
    mesh: Mesh
    batch: int  # samples in the update, which is one micro-batch
    share: ShareOf  # (number of shares, index) -> the samples in that share
    rank: int = 0  # the process's rank; the last rank has the largest shards

    def collectives(self) -> list[Collective]:
        """Returns all collectives of the update: layout conversions, BatchNorm, loss, gradients, running statistics."""
        return [*_conversions(self), *_norms(self), *_loss(self), *_gradients(self), *_statistics(self)]


def data_parallel_shares(batch: int, norm_group: int) -> ShareOf:
    """Returns a function like `equal_share_function`, but for data parallel: of entire BatchNorm groups if possible."""
    return lambda parts, index: BatchSharing(parts, 0, norm_group).micro_batches(batch)[0][index]


def _moves(
    update: PlannedUpdate, move: tuple[Layout, Layout], extent: Extent, item_bytes: int, place: tuple[str, str]
) -> list[Collective]:
    return [
        Collective(message.kind, axes, message.values, item_bytes, *place)
        for message in conversion_collectives(*move, extent, update.mesh, update.batch, update.rank)
        if (axes := long_axes(message.axes, update.mesh))
    ]


def long_axes(axes: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Returns those of the given mesh axes (indices) that have more than one process."""
    return tuple(axis for axis in axes if mesh.sizes[axis] > 1)


def _conversions(update: PlannedUpdate) -> Iterator[Collective]:
    """Yields the collectives of layout conversions between ops. Ops that read the same layout share conversions."""
    readers: dict[tuple[str, Layout, Layout], list[Op]] = {}
    for giver, reader, place in update.graph.edges():
        if giver.extents:
            wanted = input_layouts(reader, update.letters[reader.name], place)
            readers.setdefault((giver.name, *wanted), []).append(reader)
    for (name, *wanted), reading in readers.items():
        giver = update.graph.ops[name]
        value, gradient = output_layouts(giver, update.letters[name])
        trains = giver.trains and any(reader.extents or reader.name == LOSS for reader in reading)
        for extent in giver.extents:
            yield from _moves(update, (value, wanted[0]), extent, giver.item_bytes, (FORWARD, reading[0].name))
            if trains:  # false for ops that only read a tensor's sizes
                yield from _moves(update, (wanted[1], gradient), extent, giver.item_bytes, (BACKWARD, reading[0].name))


def grouped_norm_layers(op: Op) -> list[GroupedNorm]:
    modules = op.module.modules() if op.module is not None else ()
    return [module for module in modules if isinstance(module, GroupedNorm)]


def _local_channels(op: Op, layer: GroupedNorm, update: PlannedUpdate) -> int:
    if layer is not op.module:
        return layer.num_features
    cut = [axis for axis, letter in enumerate(update.letters[op.name]) if letter == "c"]
    edges = Extent((layer.num_features,)).edges(0, update.mesh.shard_count(cut), update.batch)
    place = update.mesh.shard_of(cut, update.rank)
    return edges[place + 1] - edges[place]


def _norms(update: PlannedUpdate) -> Iterator[Collective]:
    """Yields the all-reduces of BatchNorm groups that span processes: one in the forward, one in the backward pass."""
    for op in update.graph.ops.values():
        for layer in grouped_norm_layers(op):
            axes = long_axes(batch_axes(update.letters[op.name]), update.mesh)
            shared = update.share(update.mesh.shard_count(axes), update.mesh.shard_of(axes, update.rank)).shared_groups
            if axes and shared:
                values = len(shared) * 2 * _local_channels(op, layer, update)
                for when in (FORWARD, BACKWARD):
                    yield Collective("all_reduce", axes, values, _LONG_BYTES, when, op.name)


def _loss(update: PlannedUpdate) -> Iterator[Collective]:
    """Yields the collectives that convert the labels' layout, and two small all-reduces if classes are sharded."""
    mesh, letters = update.mesh, update.letters[LOSS]
    given = value_layout([0 if letter == "n" else "R" for letter in update.letters[INPUT]])
    wanted = value_layout([0 if letter == "n" else "R" for letter in letters])
    yield from _moves(update, (given, wanted), Extent((update.batch,), 1), _LONG_BYTES, (FORWARD, LOSS))
    axes = long_axes([axis for axis, letter in enumerate(letters) if letter == "o"], mesh)
    if axes:
        batch = batch_axes(letters)
        edges = Extent((update.batch,), 1).edges(0, mesh.shard_count(batch), update.batch)
        place = mesh.shard_of(batch, update.rank)
        rows = edges[place + 1] - edges[place]
        item_bytes = max(_FLOAT_BYTES, update.graph.ops[update.graph.ops[LOSS].sources[0]].item_bytes)
        yield Collective("all_reduce", axes, rows, item_bytes, FORWARD, LOSS)
        yield Collective("all_reduce", axes, 3 * rows, item_bytes, FORWARD, LOSS)


def _gradients(update: PlannedUpdate) -> Iterator[Collective]:
    layouts = parameter_layouts(update.graph, update.letters)
    sizes: dict[str, int] = {}
    gradients: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
    for name, parameter in update.graph.parameters.items():
        if parameter.requires_grad and name in layouts:
            region = layouts[name].region(update.mesh, update.rank)
            sizes[name] = math.prod(stop - start for start, stop in region)
            axes = gradient_sum_axes(layouts[name], update.mesh)
            gradients.append((name, axes, parameter.dtype, sizes[name] * parameter.element_size()))
    for axes, names in make_buckets(gradients):
        item_bytes = update.graph.parameters[names[0]].element_size()
        yield Collective("all_reduce", axes, sum(sizes[name] for name in names), item_bytes, GRADIENTS)


def _statistics(update: PlannedUpdate) -> Iterator[Collective]:
    """Yields the all-reduces of running statistics: one for all BatchNorms with samples sharded over the same axes."""
    values: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    for op in update.graph.ops.values():
        axes = long_axes(batch_axes(update.letters[op.name]), update.mesh)
        for layer in grouped_norm_layers(op):
            if axes and id(layer) not in seen and layer.running_mean is not None:
                values[axes] = values.get(axes, 0) + 2 * _local_channels(op, layer, update) + 1
            seen.add(id(layer))
    for axes, count in values.items():
        yield Collective("all_reduce", axes, count, _LONG_BYTES, STATISTICS)
