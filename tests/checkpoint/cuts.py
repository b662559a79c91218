"""Random networks, meshes and ways to cut the one over the other."""

import json
import math

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from manyhands.checkpoint import files, folders
from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.read import region_slices
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.write import local_contents
from manyhands.core.mesh import Mesh, TensorLayout

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8)
MESHES = [
    Mesh(tuple(zip(("a", "b", "c"), sizes, strict=False)))
    for sizes in ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (4, 1), (2, 1, 2))
]


def write_tensors(path, tensors):
    """A file as the safetensors library writes it, with the tensors' order as ours have it."""
    plain = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"order": json.dumps(list(tensors))})


def random_tensor(shape, kind, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return values > 0 if kind is torch.bool else values.abs().to(kind)


@st.composite
def networks(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=len(shapes), max_size=len(shapes)))
    return {f"t{n}/é": random_tensor(shape, kinds[n], n) for n, shape in enumerate(shapes)}


@st.composite
def layouts(draw, shape, mesh):
    """A layout of one shape: dimensions perhaps split up, axes dealt to them or to none."""
    view = []
    for length in shape:
        divisors = [number for number in range(1, length + 1) if length % number == 0]
        inner = draw(st.sampled_from(divisors)) if 0 not in shape and draw(st.booleans()) else None
        view += [length] if inner is None else [length // inner, inner]
    dims = range(-1, len(view))
    owner = [draw(st.sampled_from(dims)) for _ in mesh.axes]
    cuts = [(dim, tuple(axis for axis, chosen in enumerate(owner) if chosen == dim)) for dim in sorted(set(owner))]
    return TensorLayout(tuple(shape), tuple(view), tuple((dim, axes) for dim, axes in cuts if dim >= 0))


@st.composite
def cuts(draw, shapes):
    mesh = draw(st.sampled_from(MESHES))
    named = {name: draw(layouts(shape, mesh)) for name, shape in shapes.items() if draw(st.integers(0, 4))}
    return NetworkLayout(mesh, named)


def piece_of(tensor, lies, mesh, rank):
    """What a rank holds, by the definition of a layout."""
    return tensor.reshape(lies.view)[region_slices(lies.region(mesh, rank))].reshape(lies.local_shape(mesh, rank))


def local(snapshot, cut, rank):
    """A whole snapshot's pieces on one rank."""

    def mine(name, value):
        lies = cut.layouts.get(name)
        whole = lies is None or not isinstance(value, torch.Tensor) or lies.shape != value.shape
        return value if whole else piece_of(value, lies, cut.mesh, rank)

    model = {name: mine(name, tensor) for name, tensor in snapshot.model.items()}
    if snapshot.optimizer is None:
        return Snapshot(model, None, snapshot.state)
    named = snapshot.optimizer["state"].items()
    state = {name: {key: mine(name, value) for key, value in entries.items()} for name, entries in named}
    return Snapshot(model, {**snapshot.optimizer, "state": state}, snapshot.state)


def with_optimizer(model):
    """A snapshot whose optimizer has two tensors for each parameter, one of them cut with it."""
    state = {
        name: {"momentum": tensor.clone(), "step": torch.tensor(3.0), "lost": None} for name, tensor in model.items()
    }
    groups = [{"params": list(model), "lr": 0.1, "betas": (0.9, 0.99)}]
    return Snapshot(model, {"state": state, "param_groups": groups}, {"step": 5, "best": {"step": 5}})


def save_one_by_one(folder, snapshot, cut):
    """What all ranks together would save, each rank's part after the other's."""
    step = snapshot.state["step"]
    target = folder / files.step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    with folders.staging_folder(folder, step) as staged:
        written = {}
        for rank in range(cut.mesh.size):
            contents = local_contents(step, local(snapshot, cut, rank), cut, rank)
            written |= contents.write_pieces(staged, rank)
        contents.finish(staged, written, pieces=True)
        folders.commit_folder(staged, target)
    return target


def described(value):
    """All that is to be the same in two snapshots, in its order; of tensors their type, shape and bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bits(value)
    return [(key, described(one)) for key, one in value.items()] if isinstance(value, dict) else value


def assert_same(one, other):
    assert one.state == other.state
    assert described(one.model) == described(other.model)
    assert (one.optimizer is None) == (other.optimizer is None)
    for key in one.optimizer or ():
        assert described(one.optimizer[key]) == described(other.optimizer[key])


def bits(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if math.prod(tensor.shape) else b""
