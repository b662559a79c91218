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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import (
    ALONE,
    KINDS,
    MODEL,
    OPTIMIZER,
    UNSHARDED_FILES,
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
    """The processes that save together."""

    rank: int = 0  # this process's, which is its place in the mesh too
    size: int = 1  # how many they are
    # gives every process's JSON data by rank, on every process; a collective
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    device: str = "cpu"  # torch's name of the device that tensors are sent from and to
    # who writes unsharded tensors, rank 0 first; each with the ranks of its machine, of which it is the first
    writers: Mapping[int, range] = field(default_factory=lambda: {0: range(1)})

    def run(self, work: Callable[[], T]) -> list[T]:
        """Returns all processes' results (JSON data); a collective. Raises the error of the first that failed."""
        error: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer = {"result": work()}
        except Exception as raised:  # noqa: BLE001 - whatever it is, the others must learn of it before it is raised
            error, answer = raised, {"error": _as_plain(raised)}
        answers = self.gather(answer)
        failed = next((rank for rank, each in enumerate(answers) if "error" in each), None)
        if failed is None:
            return [each["result"] for each in answers]
        if error is not None and failed == self.rank:
            raise error
        content = answers[failed]["error"]
        where = f"rank {failed}: {content['where']}" if content["where"] else f"rank {failed}"
        raise _ERRORS[content["kind"]](content["what"], where, tuple(content["hints"])) from error


def _as_plain(error: Exception) -> dict[str, Any]:
    if isinstance(error, ManyhandsError):
        kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), RunError.__name__)
        return {"kind": kind, "what": error.message, "where": error.where, "hints": list(error.hints)}
    return {"kind": RunError.__name__, "what": f"{type(error).__name__}: {error}", "where": "", "hints": []}


Files = dict[str, Any]  # entries of the manifest, by name


@dataclass(frozen=True)
class Contents:
    """A checkpoint that is about to be written; the manifest is the last file of each."""

    step: int  # updates made so far
    mesh: Mesh  # the processes that the tensors are sharded over
    tensors: Mapping[str, Tensors]  # by kind ("model", "optimizer") and name, in the order that readers are to see
    texts: Mapping[str, bytes]  # the plain data, by file name
    fetch: Callable[[str, str, Region], Tensor]  # gives the values of a kind's tensor in a region of its view

    def size_bytes(self, kinds: Collection[str] = KINDS) -> int:
        return sum(one.size_bytes for kind in kinds for one in self.tensors.get(kind, {}).values())

    def write_pieces(self, staged: Path, rank: int) -> Files:
        """Writes the files of one rank; returns their entries in the manifest."""
        written: Files = {}
        for kind, tensors in self.tensors.items():
            if regions := first_held(tensors, self.mesh, rank):
                file = staged / files.piece_name(kind, rank, self.mesh.size)
                specs = [Spec(name, torch_type(tensors[name].dtype), size_of(one)) for name, one in regions.items()]
                write_stream(file, specs, lambda name, of=(kind, regions): self.fetch(of[0], name, of[1][name]))
                written[file.name] = _seal(file)
        return written

    def finish_pieces(self, staged: Path, written: Files) -> None:
        """Writes the remaining files; `written` is what `write_pieces` returned for all ranks."""
        pieces = {files.PIECES: files.json_text(describe_pieces(self.mesh, self.tensors))}
        self._finish(staged, files.PIECES_FORMAT, pieces, written)

    def write_unsharded(self, staged: Path) -> None:
        """Writes all files of an unsharded checkpoint."""
        written: Files = {}
        for kind in self.tensors:
            file = staged / UNSHARDED_FILES[kind]
            self.write_file(file, kind)
            written[file.name] = _seal(file)
        self._finish(staged, files.FORMAT, {}, written)

    def write_file(self, file: Path, kind: str) -> None:
        """Writes the unsharded tensors of one kind, in their own names and shapes."""
        tensors = self.tensors[kind]

        def fetch(name: str) -> Tensor:
            layout = tensors[name].layout
            return self.fetch(kind, name, whole_region(layout.view)).reshape(layout.shape)

        write_stream(file, unsharded_specs(tensors), fetch)

    def _finish(self, staged: Path, form: int, texts: Mapping[str, bytes], written: Files) -> None:
        entries: Files = {}
        for name, text in {**texts, **self.texts}.items():
            (staged / name).write_bytes(text)
            entries[name] = _seal(staged / name)
        try:
            own = version("manyhands")
        except PackageNotFoundError:
            own = "unknown"
        manifest = {"format": form, "step": self.step, "torch": torch.__version__, "manyhands": own}
        (staged / files.MANIFEST).write_bytes(files.manifest_text({**manifest, "files": {**entries, **written}}))
        sync(staged / files.MANIFEST)


def unsharded_specs(tensors: Tensors) -> list[Spec]:
    return [Spec(name, torch_type(described.dtype), described.layout.shape) for name, described in tensors.items()]


def _seal(file: Path) -> dict[str, Any]:
    """A file's entry in the manifest, once its bytes are on the disk; it is read back for it."""
    sync(file)
    return {"size": file.stat().st_size, "sha256": files.digest(file)}


_BLOCK_BYTES = 4 << 20


def save(folder: Path, step: int, snapshot: Snapshot) -> Path:
    """Commits folder/step-NNNNNNNN of a network that this process holds unsharded; see `CheckpointWriter`."""
    return CheckpointWriter(folder, CheckpointGroup(), NetworkLayout(ALONE, {})).write(step, snapshot)


class CheckpointWriter:
    """Writes the checkpoints of one network, together with the processes that hold its other shards.

    Args:
        folder: the checkpoints folder.
        group: the processes, as many as the mesh of the layout has.
        layout: how the network is sharded.
        pieces: each process writes its own shards, to a disk that all share. Otherwise the group's writers write
            unsharded tensors, each to a folder that it alone needs to see, and the others send their shards one by one:
            no process holds more than its own share and one tensor.
    """

    def __init__(self, folder: Path, group: CheckpointGroup, layout: NetworkLayout, *, pieces: bool = False) -> None:
        self.folder, self.group, self.layout, self.pieces = folder, group, layout, pieces

    def write(self, step: int, snapshot: Snapshot) -> Path:
        """Commits folder/step-NNNNNNNN; a collective. A checkpoint of that step that is there and verifies is left.

        The snapshot has this process's shards, in the shapes of `TensorLayout.local_shape`, and must not change until
        this returns. With `pieces` its plain data is taken from rank 0.

        Raises:
            UserError: with `pieces`, the processes don't share the folder's disk.
            RunError: a weight is NaN or infinite, or the processes hold different things; nothing is written.
            SaveError: no room, or a disk fails (with `pieces` any process's, else rank 0's or this one's); nothing is
                left behind there, training may go on.
            TypeError: the state or the optimizer's state is not plain data.
        """
        contents = self._describe(step, snapshot)
        target = self.folder / files.step_name(step)
        there = self._run(lambda: self._is_there(target, contents))
        writers = [0] if self.pieces else self.group.writers
        if all(there[writer] for writer in writers):
            return target
        if self.pieces:
            self._write_pieces(target, contents)
        else:
            self._write_unsharded(target, contents, writes=self.group.rank in writers and not there[self.group.rank])
        return target

    def _run(self, work: Callable[[], T]) -> list[T]:
        """Does the same as the group's `run`; a disk's error becomes a SaveError."""

        def run() -> T:
            try:
                return work()
            except OSError as error:
                raise save_error(self.folder, error) from error

        return self.group.run(run)

    def _describe(self, step: int, snapshot: Snapshot) -> Contents:
        """What this process holds, once it is sure that all hold shards of the same network."""
        made: list[Contents] = []

        def describe() -> str:
            mesh = self.layout.mesh
            if self.group.size != mesh.size:
                raise RunError(f"{self.group.size} processes can't save tensors sharded over {mesh}")
            refuse_non_finite(snapshot)
            made.append(held_contents(step, snapshot, self.layout, self.group.rank))
            tensors = {
                kind: {name: [entry.dtype.name, entry.layout.as_plain()] for name, entry in named.items()}
                for kind, named in made[0].tensors.items()
            }
            return hashlib.sha256(json.dumps([step, mesh.as_dict(), tensors]).encode()).hexdigest()

        digests = self.group.run(describe)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise RunError(f"ranks 0 and {other} are saving different networks or steps", f"rank {other}")
        return made[0]

    def _is_there(self, target: Path, contents: Contents) -> bool:
        """True on a writer that has the checkpoint already; where rank 0 hasn't, there is room for it."""
        if self.group.rank in self.group.writers and verifies(target):
            return True
        if self.group.rank == 0:
            self._make_room(contents)
        return False

    def _make_room(self, contents: Contents) -> None:
        """Makes the folder; an OSError where its disk has no room."""
        make_folder(self.folder)
        refuse_too_little_space(self.folder, contents.size_bytes())

    def _write_pieces(self, target: Path, contents: Contents) -> None:
        with ExitStack() as stack:
            staged = self._shared_folder(stack, contents.step)
            own = self._run(lambda: contents.write_pieces(staged, self.group.rank))

            def finish() -> None:
                if self.group.rank == 0:
                    (staged / files.TOKEN).unlink()
                    contents.finish_pieces(staged, {name: entry for one in own for name, entry in one.items()})
                    commit(staged, target)
                    remember(target)

            self._run(finish)

    def _shared_folder(self, stack: ExitStack, step: int) -> Path:
        """A staged folder that every process sees: rank 0 makes it with a token inside, the others look for that."""

        def stage() -> list[str]:
            if self.group.rank != 0:
                return []
            staged = stack.enter_context(staging(self.folder, step))
            token = os.urandom(16).hex()
            (staged / files.TOKEN).write_text(token)
            return [staged.name, token]

        name, token = self._run(stage)[0]
        staged = self.folder / name

        def see() -> None:
            file = staged / files.TOKEN
            if not file.is_file() or file.read_text() != token:
                what = f"rank {self.group.rank} can't see rank 0's checkpoint folder"
                hints = ("move --out to a disk that all machines share", "or save without checkpoint.pieces")
                raise UserError(what, str(self.folder), hints)

        self._run(see)
        return staged

    def _write_unsharded(self, target: Path, contents: Contents, *, writes: bool) -> None:
        assembled = self._assembled(contents)
        failed: list[OSError] = []

        def take_part() -> None:
            try:
                if writes:
                    self._make_room(contents)
                    with staging(self.folder, contents.step) as staged:
                        replace(contents, fetch=lambda *_: next(assembled)).write_unsharded(staged)
                        commit(staged, target)
                    remember(target)
            except OSError as error:
                if self.group.rank == 0:
                    raise
                failed.append(error)  # a copy that can't be made costs that copy alone
            finally:
                # The others send all the same, also where a writer's disk is full.
                for _ in assembled:
                    pass

        self._run(take_part)
        if failed:
            raise save_error(self.folder, failed[0]) from failed[0]

    def _assembled(self, contents: Contents) -> Iterator[Tensor]:
        """On a writer each unsharded tensor in its view, in the order in which files are written; on others nothing.

        One writer after the other is sent what nobody on its machine holds, or a neighbour has. No reference to a
        tensor is kept while the next one is put together.
        """
        for kind, tensors in contents.tensors.items():
            for spec in in_file_order(unsharded_specs(tensors)):
                for writer, near in self.group.writers.items():
                    regions = tensors[spec.name].layout.nearest(contents.mesh, near)
                    if self.group.rank == writer:
                        yield self._received(contents, kind, spec.name, regions)
                    elif self.group.rank in regions:
                        region = regions[self.group.rank]
                        piece = contents.fetch(kind, spec.name, region)
                        for block in _blocks(region, spec.dtype.itemsize):
                            if (values := piece[slices(block, region)]).numel():
                                dist.send(as_bytes(values).to(self.group.device), dst=writer)

    def _received(self, contents: Contents, kind: str, name: str, regions: dict[int, Region]) -> Tensor:
        described = contents.tensors[kind][name]
        if not described.layout.cuts and self.group.rank in regions:
            return contents.fetch(kind, name, regions[self.group.rank])
        dtype = torch_type(described.dtype)
        assembled = torch.empty(described.layout.view, dtype=dtype)
        for rank, region in regions.items():
            if rank == self.group.rank:
                assembled[slices(region)] = contents.fetch(kind, name, region)
                continue
            for block in _blocks(region, dtype.itemsize):
                count = math.prod(size_of(block)) * dtype.itemsize
                buffer = torch.empty(count, dtype=torch.uint8, device=self.group.device)
                if count:
                    dist.recv(buffer, src=rank)
                assembled[slices(block)] = buffer.cpu().view(dtype).reshape(size_of(block))
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
            raise RunError(f"{name} is tied to the sharded {other}, but has no layout", name)


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
