"""The same network as one process has it: a copy with whole parameters."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from manyhands.core.layouts import TensorLayout
from manyhands.core.mesh import Mesh
from manyhands.core.world import World
from manyhands.parallel.grid import Grid
from manyhands.parallel.modes.hybrid import HybridNetwork
from manyhands.parallel.norm import GroupedNorm, NormGroups, group_batch_norms
from manyhands.parallel.plain import gather_plain
from manyhands.parallel.proof.sums import differing_axes
from manyhands.parallel.proof.verdict import Finding, names_of

Make = Callable[[Grid], nn.Module]


def grid_alone(grid: Grid) -> Grid:
    """A mesh of one process with the same axes."""
    return Grid(Mesh(tuple((name, 1) for name in grid.mesh.names)), World(device=grid.world.device))


def both(net: nn.Module | Make, grid: Grid, alone_grid: Grid) -> tuple[nn.Module, nn.Module]:
    """The network as it runs here, and one for a mesh of one process; copies that are ours."""
    made: list[nn.Module] = []
    for place in (grid, alone_grid):
        if isinstance(net, nn.Module):
            groups = {id(one.groups): NormGroups() for one in net.modules() if isinstance(one, GroupedNorm)}
            made.append(copy.deepcopy(net, {id(grid): place, **groups}))
        else:
            torch.manual_seed(0)
            made.append(net(place))
    dtype = torch.float32 if grid.world.device.startswith("mps") else torch.float64
    for model in made:
        model.to(grid.world.device, dtype).train()
        for parameter in model.parameters():
            parameter.grad = None
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
    group_batch_norms(made[0])
    return made[0], made[1]


def make_whole(network: HybridNetwork, alone: nn.Module, tolerance: float) -> list[Finding]:
    """Gives the network of one process the whole of what the processes hold."""
    mesh = network.grid.mesh
    mine = network.model.state_dict(keep_vars=True)
    found: list[Finding] = []
    for name, target in alone.state_dict(keep_vars=True).items():
        if not isinstance(target, Tensor) or not isinstance(mine.get(name), Tensor):
            continue
        layout, local = network.layouts[name], mine[name].detach()
        if isinstance(target, nn.Parameter) and tuple(target.shape) not in {layout.shape, tuple(local.shape)}:
            found.append(_unmarked(name, tuple(target.shape), layout.shape, mesh))
            continue
        pieces = gather(local, network.grid)
        differing = differing_axes(pieces, mesh, layout.cut_axes, tolerance)
        if differing:
            found.append(_replicas(name, differing, mesh))
            continue
        target.data = _together(pieces, layout, mesh)
    for module in alone.modules():
        if isinstance(module, GroupedNorm) and module.running_mean is not None:
            module.num_features = len(module.running_mean)
    return found


def _unmarked(name: str, alone: tuple[int, ...], here: tuple[int, ...], mesh: Mesh) -> Finding:
    what = f"it has shape {alone} on one process, and {here} here, where it is not marked so"
    mend = "cut it with shard or shard_module, or make it Parameter(piece, layerwise_parallel=(axis, dimension))"
    return Finding(name, "mark", mesh.names, what, mend)


def _replicas(name: str, axes: tuple[int, ...], mesh: Mesh) -> Finding:
    where = names_of(axes, mesh)
    what = f"its values differ between processes along {where}, which does not cut it"
    mend = f"make it equal (the same seed), or, if it is cut over {where}, by shard"
    return Finding(name, "replicas", tuple(mesh.names[axis] for axis in axes), what, mend)


def gather(tensor: Tensor, grid: Grid) -> list[Tensor]:
    """By rank, every process's tensor, whatever its shape."""
    if grid.world.alone:
        return [tensor]
    shapes = [torch.Size(shape) for shape in gather_plain(list(tensor.shape), grid.world)]
    room = tensor.new_zeros(max(shape.numel() for shape in shapes))
    room[: tensor.numel()] = tensor.reshape(-1)
    everybody = [torch.empty_like(room) for _ in shapes]
    dist.all_gather(everybody, room)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(everybody, shapes, strict=True)]


def _together(pieces: list[Tensor], layout: TensorLayout, mesh: Mesh) -> Tensor:
    whole = pieces[0].new_empty(layout.shape)
    for rank, region in layout.pieces(mesh):
        region_of(whole, region).copy_(pieces[rank])
    return whole


def region_of(tensor: Tensor, region: tuple[tuple[int, int], ...]) -> Tensor:
    """The part of a tensor between (start, stop) in each dimension."""
    for dim, (start, stop) in enumerate(region):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor
