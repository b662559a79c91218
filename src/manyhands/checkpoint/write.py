"""Saves checkpoints: written to a temporary folder, synced to disk, committed by a rename.

All processes of a run save together. A network that one process holds whole is one in pieces on a mesh of one. A
failure on one process is raised on all, so that none waits for it.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import (
    ALONE,
    MODEL,
    OPTIMIZER,
    NetworkLayout,
    Region,
    TensorEntry,
    Tensors,
    describe_pieces,
    first_held,
    size_of,
    whole_region,
)
from manyhands.checkpoint.files import TornCheckpointError
from manyhands.checkpoint.folders import commit, make_folder, remember, staging, verifies
from manyhands.checkpoint.read import slices
from manyhands.checkpoint.snapshot import Snapshot, flatten_optimizer, parameter_names
from manyhands.checkpoint.stream import Spec, as_bytes, element_type, in_file_order, torch_type, write_stream
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.files import sync
from manyhands.core.mesh import Mesh, TensorLayout, unsharded

_MARGIN_BYTES = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NotFiniteError(RunError):
    """A weight is NaN or infinite."""


class SaveError(RunError):
    """The disk is full or failing. Earlier checkpoints are untouched, so training may go on."""


def refuse_non_finite(snapshot: Snapshot) -> None:
    """Raises a RunError that names the first tensor of the network with a NaN or an infinity that was finite once."""
    for name, tensor in snapshot.model.items():
        if name in snapshot.endless or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            what = f"{name} has {count} of {tensor.numel()} values that are NaN or infinite; no checkpoint was saved"
            raise NotFiniteError(what, name, ("lower train.lr, clip gradients, or resume from an earlier checkpoint",))


def refuse_too_little_space(folder: Path, size_bytes: int) -> None:
    """Raises an OSError where a folder's disk has no room for so many bytes of tensors."""
    needed = size_bytes + _MARGIN_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def save_error(folder: Path, error: OSError) -> SaveError:
    """The error for users; says what the disk said."""
    text = error.strerror or str(error)
    if error.errno in _FULL:
        hints = (
            "free some space, or point --out at another disk",
            "earlier checkpoints are kept; training can continue",
        )
        return SaveError(f"the disk is full: {text}", str(folder), hints)
    return SaveError(f"writing failed: {text}", str(folder), ("earlier checkpoints are kept",))


T = TypeVar("T")

# The narrower ones first.
_ERRORS: dict[str, type[ManyhandsError]] = {
    kind.__name__: kind for kind in (NotFiniteError, SaveError, TornCheckpointError, UserError, RunError)
}


@dataclass(frozen=True)
class CheckpointGroup:
    """The processes that save or load together."""

    rank: int = 0  # this process's, which is its place in the mesh too
    size: int = 1  # how many they are
    # gives every process's JSON data by rank, on every process; a collective
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    device: str = "cpu"  # torch's name of the device that tensors are sent from and to
    # who writes what is saved whole, rank 0 first; each with the ranks of its machine, of which it is the first
    writers: Mapping[int, range] = field(default_factory=lambda: {0: range(1)})


def together(peers: CheckpointGroup, work: Callable[[], T]) -> list[T]:
    """All processes' results (JSON data); a collective. Raises ManyhandsError: that of the first that failed."""
    own: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must learn of it before it is raised
        own = error
    answers = peers.gather({"result": result} if own is None else {"error": _as_plain(own)})
    failed = next((rank for rank, answer in enumerate(answers) if "error" in answer), None)
    if failed is None:
        return [answer["result"] for answer in answers]
    if own is not None and failed == peers.rank:
        raise own
    raise _from_plain(answers[failed]["error"], failed) from own


def send(tensor: Tensor, to: int, peers: CheckpointGroup) -> None:
    """Sends a tensor's values; the other one calls `receive`."""
    if tensor.numel():
        dist.send(as_bytes(tensor).to(peers.device), dst=to)


def receive(shape: tuple[int, ...], dtype: torch.dtype, source: int, peers: CheckpointGroup) -> Tensor:
    """Receives the values of a tensor of known shape and type, as a CPU tensor."""
    count = math.prod(shape) * dtype.itemsize
    buffer = torch.empty(count, dtype=torch.uint8, device=peers.device)
    if count:
        dist.recv(buffer, src=source)
    return buffer.cpu().view(dtype).reshape(shape)


def _as_plain(error: Exception) -> dict[str, Any]:
    if isinstance(error, ManyhandsError):
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), RunError.__name__)
        return {"kind": kind, "what": error.message, "where": error.where, "hints": list(error.hints)}
    return {"kind": RunError.__name__, "what": f"{type(error).__name__}: {error}", "where": "", "hints": []}


def _from_plain(content: dict[str, Any], rank: int) -> ManyhandsError:
    where = f"rank {rank}: {content['where']}" if content["where"] else f"rank {rank}"
    return _ERRORS[content["kind"]](content["what"], where, tuple(content["hints"]))


# (kind, name, region) -> the values there, in the shape of the region.
Fetch = Callable[[str, str, Region], Tensor]
Files = dict[str, Any]
WHOLE_NAMES = {MODEL: files.MODEL, OPTIMIZER: files.OPTIMIZER}


@dataclass(frozen=True)
class Contents:
    """A checkpoint that is about to be written."""

    step: int  # updates made so far
    mesh: Mesh  # the processes that it is cut over
    tensors: Mapping[str, Tensors]  # by kind ("model", "optimizer") and name, in the order that readers are to see
    texts: Mapping[str, bytes]  # the plain data, by file name
    fetch: Fetch  # gives a tensor's values in a region of its view


def write_pieces(staged: Path, contents: Contents, rank: int) -> Files:
    """Writes the files of one rank; their entries in the manifest."""
    written: Files = {}
    for kind, tensors in contents.tensors.items():
        regions = first_held(tensors, contents.mesh, rank)
        if not regions:
            continue
        file = staged / files.piece_name(kind, rank, contents.mesh.size)

        def fetch(name: str, kind: str = kind, regions: dict[str, Region] = regions) -> Tensor:
            return contents.fetch(kind, name, regions[name])

        specs = [Spec(name, torch_type(tensors[name].dtype), size_of(region)) for name, region in regions.items()]
        write_stream(file, specs, fetch)
        written[file.name] = _seal(file)
    return written


def finish_pieces(staged: Path, contents: Contents, written: Files) -> None:
    """Writes what is written once, the manifest last; `written` is what `write_pieces` returned, of all ranks."""
    texts = {files.PIECES: files.json_text(describe_pieces(contents.mesh, contents.tensors)), **contents.texts}
    _write_manifest(staged, contents.step, {**_write_texts(staged, texts), **written}, files.PIECES_FORMAT)


def write_full(staged: Path, contents: Contents) -> None:
    """Writes a checkpoint whole, the manifest last."""
    written = _write_texts(staged, contents.texts)
    for kind in contents.tensors:
        file = staged / WHOLE_NAMES[kind]
        write_file_atomic(file, contents, kind)
        written[file.name] = _seal(file)
    _write_manifest(staged, contents.step, written, files.FORMAT)


def write_file_atomic(file: Path, contents: Contents, kind: str) -> None:
    """Writes the tensors of one kind into one file, in their own names and shapes."""
    tensors = contents.tensors[kind]

    def fetch(name: str) -> Tensor:
        cut = tensors[name].layout
        return contents.fetch(kind, name, whole_region(cut.view)).reshape(cut.shape)

    write_stream(file, whole_specs(tensors), fetch)


def whole_specs(tensors: Tensors) -> list[Spec]:
    """Tensors as a file holds them whole."""
    return [Spec(name, torch_type(described.dtype), described.layout.shape) for name, described in tensors.items()]


def _write_texts(staged: Path, texts: Mapping[str, bytes]) -> Files:
    written: Files = {}
    for name, text in texts.items():
        (staged / name).write_bytes(text)
        written[name] = _seal(staged / name)
    return written


def _seal(file: Path) -> dict[str, Any]:
    """A file's entry in the manifest, once its bytes are on the disk; it is read back for it."""
    sync(file)
    return {"size": file.stat().st_size, "sha256": files.digest(file)}


def _write_manifest(staged: Path, step: int, entries: dict[str, Any], number: int) -> None:
    """Writes the manifest, the last file; `entries` are those of the other files by name, `number` the format."""
    manifest = {"format": number, "step": step, "torch": torch.__version__, "manyhands": _own_version()}
    (staged / files.MANIFEST).write_bytes(files.manifest_text({**manifest, "files": entries}))
    sync(staged / files.MANIFEST)


def _own_version() -> str:
    try:
        return version("manyhands")
    except PackageNotFoundError:
        return "unknown"


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
    target = folder / files.step_name(step)
    if _where_it_is(target, contents, peers)[0]:
        return target
    with ExitStack() as stack:
        staged = _shared_folder(stack, target, step, peers)
        own = together(peers, _saving(folder, lambda: write_pieces(staged, contents, peers.rank)))

        def finish() -> None:
            if peers.rank == 0:
                (staged / files.TOKEN).unlink()
                finish_pieces(staged, contents, {name: entry for one in own for name, entry in one.items()})
                commit(staged, target)
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
    target = folder / files.step_name(step)
    there = _where_it_is(target, contents, peers)
    if all(there[writer] for writer in peers.writers):
        return target
    assembled = _assembled(contents, peers)
    failed: list[OSError] = []

    def write() -> None:
        _make_room(target, contents)
        gathering = Contents(step, network_layout.mesh, contents.tensors, contents.texts, lambda *_: next(assembled))
        with staging(folder, step) as staged:
            write_full(staged, gathering)
            commit(staged, target)
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
    make_folder(target.parent)
    sizes = [described.size_bytes for named in contents.tensors.values() for described in named.values()]
    refuse_too_little_space(target.parent, sum(sizes))


def _shared_folder(stack: ExitStack, target: Path, step: int, peers: CheckpointGroup) -> Path:
    """A staged folder that every process sees: rank 0 makes it with a token inside, the others look for that."""

    def stage() -> list[str]:
        if peers.rank != 0:
            return []
        staged = stack.enter_context(staging(target.parent, step))
        token = os.urandom(16).hex()
        (staged / files.TOKEN).write_text(token)
        return [staged.name, token]

    name, token = together(peers, _saving(target.parent, stage))[0]
    staged = target.parent / name

    def see() -> None:
        file = staged / files.TOKEN
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
    texts = {files.STATE: files.json_text(snapshot.state)}
    if snapshot.optimizer is not None:
        branches, held[OPTIMIZER] = flatten_optimizer(snapshot.optimizer)
        texts[files.OPTIMIZER_PLAN] = files.json_text(branches)
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
