"""Saves a run's state, all or nothing: written beside, synced to disk, committed by a rename.

A network that one process holds whole is one in pieces on a mesh of one. Otherwise every process calls these.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.checkpoint import commit, layout
from manyhands.checkpoint.kept import remember, verifies
from manyhands.checkpoint.pieces import ALONE, MODEL, OPTIMIZER, NetworkLayout, Region, TensorEntry, Tensors, size_of
from manyhands.checkpoint.refuse import refuse_non_finite, refuse_too_little_space, save_error
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.stored import slices
from manyhands.checkpoint.stream import element_type, in_file_order, torch_type
from manyhands.checkpoint.tensors import flatten_optimizer, parameter_names
from manyhands.checkpoint.together import CheckpointGroup, receive, send, together
from manyhands.checkpoint.write import Contents, finish_pieces, whole_specs, write_atomic, write_pieces
from manyhands.core.errors import RunError, UserError
from manyhands.core.mesh import TensorLayout, unsharded

T = TypeVar("T")

_BLOCK_BYTES = 4 << 20


def save(folder: Path, step: int, snapshot: Snapshot) -> Path:
    """Commits folder/step-NNNNNNNN of a network that this process holds whole; see `save_full`."""
    return save_full(folder, step, snapshot, NetworkLayout(ALONE, {}), CheckpointGroup())


def save_pieces(
    folder: Path, step: int, snapshot: Snapshot, network_layout: NetworkLayout, peers: CheckpointGroup
) -> Path:
    """Commits folder/step-NNNNNNNN in pieces, each written by the process that holds it; a collective.

    All processes, as many as the mesh has, share the folder's disk. The snapshot has this process's pieces, in the
    shapes of `TensorLayout.local_shape`, and must not change until this returns; its state, and what its optimizer has
    beside tensors, are taken from rank 0. Returns the committed folder; one of that step that is there and verifies is
    left.

    Raises:
        UserError: the processes don't share the folder's disk.
        RunError: a weight is NaN or infinite, or the processes hold different things; nothing is written.
        SaveError: no room, or the disk of a process fails; nothing is left behind, training may go on.
    """
    contents = _agreed_contents(step, snapshot, network_layout, peers)
    target = folder / layout.step_name(step)
    if _where_it_is(target, contents, peers)[0]:
        return target
    with ExitStack() as stack:
        staged = _shared_folder(stack, target, step, peers)
        own = together(peers, _saving(folder, lambda: write_pieces(staged, contents, peers.rank)))

        def finish() -> None:
            if peers.rank == 0:
                (staged / layout.TOKEN).unlink()
                finish_pieces(staged, contents, {name: entry for files in own for name, entry in files.items()})
                commit.commit(staged, target)
                remember(target)

        together(peers, _saving(folder, finish))
    return target


def save_full(
    folder: Path, step: int, snapshot: Snapshot, network_layout: NetworkLayout, peers: CheckpointGroup
) -> Path:
    """Commits folder/step-NNNNNNNN whole, with a manifest; writers write, the others send their pieces; a collective.

    Only writers need to see the folder, which may be another disk's for each. Tensors are sent and written one by one,
    so no process holds more than its own share and one tensor. For the snapshot and what is returned see `save_pieces`.

    Raises:
        RunError: a weight is NaN or infinite, or the processes hold different things; nothing is written.
        SaveError: no room, or the disk fails, rank 0's or this process's own; nothing is left behind there, training
            may go on.
        TypeError: the state or the optimizer's state is not plain data.
    """
    contents = _agreed_contents(step, snapshot, network_layout, peers)
    target = folder / layout.step_name(step)
    there = _where_it_is(target, contents, peers)
    if all(there[writer] for writer in peers.writers):
        return target
    assembled = _assembled(contents, peers)
    failed: list[OSError] = []

    def write() -> None:
        _make_room(target, contents)
        gathering = Contents(step, network_layout.mesh, contents.tensors, contents.texts, lambda *_: next(assembled))
        with commit.staging(folder, step) as staged:
            write_atomic(staged, gathering)
            commit.commit(staged, target)
        remember(target)

    def take_part() -> None:
        try:
            if peers.rank in peers.writers and not there[peers.rank]:
                write()
        except OSError as error:
            if peers.rank == 0:
                raise
            failed.append(error)  # a copy that can't be made costs that copy alone
        finally:
            # The others send all the same, also where a writer's disk is full.
            for _ in assembled:
                pass

    together(peers, _saving(folder, take_part))
    if failed:
        raise save_error(folder, failed[0]) from failed[0]
    return target


def _agreed_contents(step: int, snapshot: Snapshot, network_layout: NetworkLayout, peers: CheckpointGroup) -> Contents:
    """What this process holds, once it is sure that all hold pieces of the same network."""
    made: list[Contents] = []

    def describe() -> str:
        if peers.size != network_layout.mesh.size:
            raise RunError(f"{peers.size} processes can't save tensors sharded over {network_layout.mesh}")
        refuse_non_finite(snapshot)
        made.append(held_contents(step, snapshot, network_layout, peers.rank))
        plain = [step, network_layout.mesh.as_dict(), as_plain(made[0].tensors)]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    digests = together(peers, describe)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise RunError(f"ranks 0 and {other} hold pieces of different networks or steps", f"rank {other}")
    return made[0]


def _where_it_is(target: Path, contents: Contents, peers: CheckpointGroup) -> list[bool]:
    """By rank whether that one, a writer, has the checkpoint already; where rank 0 hasn't, there is room for it."""

    def look() -> bool:
        if peers.rank in peers.writers and verifies(target):
            return True
        if peers.rank == 0:
            _make_room(target, contents)
        return False

    return together(peers, _saving(target.parent, look))


def _make_room(target: Path, contents: Contents) -> None:
    """Makes a checkpoint's folder's own folder; an OSError where it has no room."""
    commit.make_folder(target.parent)
    sizes = [described.size_bytes for named in contents.tensors.values() for described in named.values()]
    refuse_too_little_space(target.parent, sum(sizes))


def _shared_folder(stack: ExitStack, target: Path, step: int, peers: CheckpointGroup) -> Path:
    """A staged folder that every process sees: rank 0 makes it with a token inside, the others look for that."""

    def stage() -> list[str]:
        if peers.rank != 0:
            return []
        staged = stack.enter_context(commit.staging(target.parent, step))
        token = os.urandom(16).hex()
        (staged / layout.TOKEN).write_text(token)
        return [staged.name, token]

    name, token = together(peers, _saving(target.parent, stage))[0]
    staged = target.parent / name

    def see() -> None:
        file = staged / layout.TOKEN
        if not file.is_file() or file.read_text() != token:
            what = f"rank {peers.rank} can't see rank 0's checkpoint folder"
            hints = ("move --out to a disk that all machines share", "or save without checkpoint.pieces")
            raise UserError(what, str(target.parent), hints)

    together(peers, _saving(target.parent, see))
    return staged


def _saving(folder: Path, work: Callable[[], T]) -> Callable[[], T]:
    """The same work; what the disk says becomes a SaveError."""

    def run() -> T:
        try:
            return work()
        except OSError as error:
            raise save_error(folder, error) from error

    return run


def _assembled(contents: Contents, peers: CheckpointGroup) -> Iterator[Tensor]:
    """On a writer each whole tensor in its view, in the order in which files are written; on others nothing, but sends.

    One writer after the other is sent what nobody on its machine holds, or a neighbour has. No reference to a tensor is
    kept while the next one is put together.
    """
    for kind, tensors in contents.tensors.items():
        for spec in in_file_order(whole_specs(tensors)):
            for writer, near in peers.writers.items():
                regions = tensors[spec.name].layout.nearest(contents.mesh, near)
                if peers.rank == writer:
                    yield _received(contents, kind, spec.name, regions, peers)
                elif peers.rank in regions:
                    region = regions[peers.rank]
                    piece = contents.fetch(kind, spec.name, region)
                    for block in _blocks(region, spec.dtype.itemsize):
                        send(piece[slices(block, region)], writer, peers)


def _received(contents: Contents, kind: str, name: str, regions: dict[int, Region], peers: CheckpointGroup) -> Tensor:
    described = contents.tensors[kind][name]
    if not described.layout.cuts and peers.rank in regions:
        return contents.fetch(kind, name, regions[peers.rank])
    dtype = torch_type(described.dtype)
    assembled = torch.empty(described.layout.view, dtype=dtype)
    for rank, region in regions.items():
        if rank == peers.rank:
            assembled[slices(region)] = contents.fetch(kind, name, region)
            continue
        for block in _blocks(region, dtype.itemsize):
            assembled[slices(block)] = receive(size_of(block), dtype, rank, peers)
    return assembled


def _blocks(region: Region, item_bytes: int) -> Iterator[Region]:
    """A region in parts that are sent one by one, so that little is in memory beside the tensor they go into."""
    sizes = size_of(region)
    if not sizes:
        yield region
        return
    longest = sizes.index(max(sizes))
    start, stop = region[longest]
    step = max(1, _BLOCK_BYTES * (stop - start) // max(1, math.prod(sizes) * item_bytes))
    for first in range(start, stop, step):
        yield (*region[:longest], (first, min(first + step, stop)), *region[longest + 1 :])


def held_contents(step: int, snapshot: Snapshot, network_layout: NetworkLayout, rank: int) -> Contents:
    """A rank's pieces as contents; `fetch` gives the rank's own region of a tensor, whichever is asked for.

    Raises:
        RunError: a piece doesn't have the shape that its layout says, or one of two names of a piece has no layout.
        TypeError: the state or the optimizer's state is not plain data.
    """
    _refuse_half_named(snapshot.model, network_layout)
    held: dict[str, Mapping[str, Tensor]] = {MODEL: snapshot.model}
    owners = {name: name for name in snapshot.model}
    texts = {layout.STATE: layout.text(snapshot.state)}
    if snapshot.optimizer is not None:
        branches, held[OPTIMIZER] = flatten_optimizer(snapshot.optimizer)
        texts[layout.OPTIMIZER_PLAN] = layout.text(branches)
        owners |= parameter_names(branches)
    tensors = {
        kind: {
            name: _describe(name, tensor, owners.get(name, ""), network_layout, rank) for name, tensor in named.items()
        }
        for kind, named in held.items()
    }

    def fetch(kind: str, name: str, region: Region) -> Tensor:
        return held[kind][name].detach().reshape(size_of(region))

    return Contents(step, network_layout.mesh, tensors, texts, fetch)


def _refuse_half_named(model: Mapping[str, Tensor], network_layout: NetworkLayout) -> None:
    """A piece that has two names is a piece under both, so a layout must be there for both."""
    pieces = {
        model[name].data_ptr(): name for name, lies in network_layout.layouts.items() if lies.cuts and name in model
    }
    for name, tensor in model.items():
        other = pieces.get(tensor.data_ptr())
        if other is not None and name not in network_layout.layouts and tensor.numel():
            raise RunError(f"{name} shares its values with the sharded {other}, but has no layout", name)


def _describe(name: str, tensor: Tensor, owner: str, network_layout: NetworkLayout, rank: int) -> TensorEntry:
    """A tensor lies as the parameter does that it belongs to, where it has that one's shape; else it is whole."""
    shape = tuple(tensor.shape)
    lies: TensorLayout = network_layout.layouts.get(owner) or unsharded(shape)
    expected = lies.local_shape(network_layout.mesh, rank)
    if shape == expected:
        return TensorEntry(element_type(tensor.dtype), lies)
    # A count of steps is the same everywhere. Anything else of a cut parameter could be cut in any way.
    if name != owner and (tensor.ndim == 0 or not lies.cuts):
        return TensorEntry(element_type(tensor.dtype), unsharded(shape))
    what = f"rank {rank} holds {list(shape)} of {name}, but the layout expects {list(expected)}"
    raise RunError(
        what, name, ("use sgd or adamw, or don't shard: this optimizer's state can't be sharded like the parameters",)
    )


def as_plain(tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """Types and layouts as JSON data, to be compared between processes."""
    return {
        kind: {name: [described.dtype.name, described.layout.as_plain()] for name, described in named.items()}
        for kind, named in tensors.items()
    }
