"""Saves checkpoints from all processes: writes a temporary folder, syncs it to disk, then renames it to commit."""

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

from manyhands.checkpoint import describe, files, folders, read
from manyhands.checkpoint.describe import MODEL, OPTIMIZER, NetworkLayout, Region, Tensors, shape_of
from manyhands.checkpoint.snapshot import Snapshot, flatten_optimizer, tensor_owners
from manyhands.core.errors import ManyhandsError, RunError, UserError
from manyhands.core.files import sync_to_disk
from manyhands.core.mesh import Mesh, unsharded_layout

_MARGIN_BYTES = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape of each tensor of a file, by key
_CODES = {read.torch_type(kind): code for code, kind in describe.BY_CODE.items()}
T = TypeVar("T")
Files = dict[str, Any]  # entries of the manifest, by name
_BLOCK_BYTES = 4 << 20


class NotFiniteError(RunError):
    """Raised if a weight is NaN or infinite."""


class SaveError(RunError):
    """Raised if the disk is full or failing. Earlier checkpoints are intact, and training may continue."""


def refuse_non_finite(snapshot: Snapshot) -> None:
    """Raises NotFiniteError if a tensor has NaN or infinity, unless it had some before training."""
    for name, tensor in snapshot.model.items():
        if name in snapshot.allowed_nonfinite or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.float() if tensor.element_size() == 1 else tensor
        if not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            what = f"{name} has {count} of {tensor.numel()} values that are NaN or infinite; no checkpoint was saved"
            raise NotFiniteError(what, name, ("lower train.lr, clip gradients, or resume from an earlier checkpoint",))


def refuse_too_little_space(folder: Path, size_bytes: int) -> None:
    """Raises OSError if a folder's disk has less free space than `size_bytes` plus a margin."""
    needed = size_bytes + _MARGIN_BYTES
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def save_error(folder: Path, error: OSError) -> SaveError:
    text = error.strerror or str(error)
    if error.errno in _FULL:
        free = "free some space, or point --out at another disk"
        hints = (free, "earlier checkpoints are kept; training can continue")
        return SaveError(f"the disk is full: {text}", str(folder), hints)
    return SaveError(f"writing failed: {text}", str(folder), ("check the disk; earlier checkpoints are kept",))


def write_stream(path: Path, specs: Specs, fetch: Callable[[str], Tensor]) -> None:
    """Writes a .safetensors file one tensor at a time, so that the file may exceed the memory.

    Readers see the order of `specs`. `fetch(name)` returns a tensor, and is called in the order of `in_file_order`.
    Raises OSError if the disk fails, TypeError if the format doesn't support a type.
    """
    header: dict[str, object] = {"__metadata__": {"order": json.dumps(list(specs))}}
    names, position = in_file_order(specs), 0
    for name in names:
        dtype, shape = specs[name]
        if dtype not in _CODES:
            raise TypeError(f"{name} is {dtype}, which a .safetensors file can't hold")
        begin, position = position, position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, position]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = fetch(name)
            if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {specs[name]}")
            file.write(_as_bytes(tensor).numpy().data)
            del tensor  # frees memory before the next tensor is assembled


def in_file_order(specs: Specs) -> list[str]:
    """Returns the tensor names with the largest element types first, which aligns each tensor in the file."""
    return sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's values as uint8 [bytes] on the CPU, in the same memory if it is contiguous there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


# Subclasses before their bases: the first match is used.
_ERRORS: dict[str, type[ManyhandsError]] = {
    kind.__name__: kind for kind in (NotFiniteError, SaveError, files.TornCheckpointError, UserError, RunError)
}


@dataclass(frozen=True)
class CheckpointGroup:
    """The processes that save a checkpoint together."""

    rank: int = 0  # rank of this process, in the group and in the mesh
    size: int = 1
    # returns JSON data of all processes, by rank, on every process; a collective
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    device: str = "cpu"  # device of tensors that are sent
    # ranks that write unsharded tensors, rank 0 first; each maps to the ranks of its machine, and is the first of them
    writers: Mapping[int, range] = field(default_factory=lambda: {0: range(1)})


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to write."""

    step: int
    mesh: Mesh
    tensors: Mapping[str, Tensors]  # by kind ("model", "optimizer") and name, in the order that readers see
    texts: Mapping[str, bytes]  # plain data, by file name
    fetch: Callable[[str, str, Region], Tensor]  # by kind, name and region of the tensor's view

    def size_bytes(self, kinds: Collection[str] = describe.KINDS) -> int:
        return sum(one.size_bytes for kind in kinds for one in self.tensors.get(kind, {}).values())

    def write_pieces(self, staged: Path, rank: int) -> Files:
        """Writes the shards of one rank. Returns their files' manifest entries, {file name: entry}."""
        written: Files = {}
        for kind, tensors in self.tensors.items():
            if regions := describe.shards_to_write(tensors, self.mesh, rank):
                file = staged / files.piece_name(kind, rank, self.mesh.size)
                self.write_file(file, kind, regions)
                written[file.name] = _manifest_entry(file)
        return written

    def write_unsharded(self, staged: Path) -> None:
        written: Files = {}
        for kind in self.tensors:
            file = staged / describe.UNSHARDED_FILES[kind]
            self.write_file(file, kind)
            written[file.name] = _manifest_entry(file)
        self.finish(staged, written)

    def write_file(self, file: Path, kind: str, regions: Mapping[str, Region] | None = None) -> None:
        """Writes the unsharded tensors of one kind or, if given, the `regions` of their views."""
        tensors = self.tensors[kind]
        specs = unsharded_specs(tensors)
        if regions is not None:
            specs = {name: (specs[name][0], shape_of(region)) for name, region in regions.items()}

        def fetch(name: str) -> Tensor:
            region = describe.full_region(tensors[name].layout.view) if regions is None else regions[name]
            return self.fetch(kind, name, region).reshape(specs[name][1])

        write_stream(file, specs, fetch)

    def finish(self, staged: Path, written: Files, *, pieces: bool = False) -> None:
        """Writes the other files, the manifest last. `written`: the manifest entries of all ranks' files."""
        entries: Files = {}
        texts = {files.PIECES: files.json_text(describe.describe_pieces(self.mesh, self.tensors))} if pieces else {}
        for name, text in {**texts, **self.texts}.items():
            (staged / name).write_bytes(text)
            entries[name] = _manifest_entry(staged / name)
        try:
            own = version("manyhands")
        except PackageNotFoundError:
            own = "unknown"
        form = files.PIECES_FORMAT if pieces else files.FORMAT
        manifest = {"format": form, "step": self.step, "torch": torch.__version__, "manyhands": own}
        (staged / files.MANIFEST).write_bytes(files.manifest_text({**manifest, "files": {**entries, **written}}))
        sync_to_disk(staged / files.MANIFEST)


def unsharded_specs(tensors: Tensors) -> Specs:
    return {name: (read.torch_type(entry.dtype), entry.layout.shape) for name, entry in tensors.items()}


def _manifest_entry(file: Path) -> dict[str, Any]:
    sync_to_disk(file)
    return {"size": file.stat().st_size, "sha256": files.file_digest(file)}


def save_unsharded(folder: Path, step: int, snapshot: Snapshot) -> Path:
    """Saves an unsharded network as folder/step-NNNNNNNN, in one process, with a `CheckpointWriter`."""
    return CheckpointWriter(folder, CheckpointGroup(), NetworkLayout()).write(step, snapshot)


class CheckpointWriter:
    """Writes the checkpoints of one network, together with the processes that hold its other shards.

    `group` has the size of the layout's mesh. With `pieces`, each process writes its shards to a shared disk. Else each
    writer in the group writes unsharded tensors to its local folder. It receives the other ranks' shards one tensor
    at a time, so a process holds at most its shards and one unsharded tensor.
    """

    def __init__(self, folder: Path, group: CheckpointGroup, layout: NetworkLayout, *, pieces: bool = False) -> None:
        self.folder, self.group, self.layout, self.pieces = folder, group, layout, pieces

    def write(self, step: int, snapshot: Snapshot) -> Path:
        """Saves folder/step-NNNNNNNN. A collective. Keeps an existing valid checkpoint of that step.

        The snapshot has this process's shards, in the shapes of `TensorLayout.local_shape`, and must not change until
        this method returns. With `pieces`, rank 0 supplies the plain data.

        Raises:
            UserError: with `pieces`, the processes don't share the folder's disk.
            RunError: a weight is NaN or infinite, or the ranks have different networks or steps; nothing is written.
            SaveError: a disk is full or fails (with `pieces` any rank's, else rank 0's or this rank's).
            TypeError: the state or the optimizer state is not plain data.
        """
        contents = self._collect_contents(step, snapshot)
        target = self.folder / files.step_name(step)
        there = self._run_on_all(lambda: self._has_valid_checkpoint(target, contents))
        writers = [0] if self.pieces else self.group.writers
        if all(there[writer] for writer in writers):
            return target
        if self.pieces:
            self._write_pieces(target, contents)
        else:
            self._write_unsharded(target, contents, writes=self.group.rank in writers and not there[self.group.rank])
        return target

    def _run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Calls `work` on all ranks. Returns each rank's result (JSON), or raises the first error. A collective."""
        error: Exception | None = None
        try:
            answer: dict[str, Any] = {"result": work()}
        except Exception as raised:  # noqa: BLE001 - raised below, after the other processes know
            error = raised
            if isinstance(raised, OSError):
                error = save_error(self.folder, raised)
                error.__cause__ = raised
            plain = error if isinstance(error, ManyhandsError) else RunError(f"{type(error).__name__}: {error}")
            kind = next((name for name, known in _ERRORS.items() if isinstance(plain, known)), RunError.__name__)
            answer = {"error": [kind, plain.message, plain.where, list(plain.hints)]}
        answers = self.group.gather(answer)
        failed = next((rank for rank, each in enumerate(answers) if "error" in each), None)
        if failed is None:
            return [each["result"] for each in answers]
        if error is not None and failed == self.group.rank:
            raise error
        kind, what, where, hints = answers[failed]["error"]
        raise _ERRORS[kind](what, f"rank {failed}: {where}" if where else f"rank {failed}", tuple(hints)) from error

    def _collect_contents(self, step: int, snapshot: Snapshot) -> Contents:
        """Returns what this rank writes, after checking that all ranks save the same network. A collective."""
        made: list[Contents] = []

        def digest() -> str:
            mesh = self.layout.mesh
            if self.group.size != mesh.size:
                raise RunError(f"{self.group.size} processes can't save tensors sharded over {mesh}")
            refuse_non_finite(snapshot)
            made.append(local_contents(step, snapshot, self.layout, self.group.rank))
            tensors = {
                kind: {name: [entry.dtype.name, entry.layout.as_plain()] for name, entry in named.items()}
                for kind, named in made[0].tensors.items()
            }
            return hashlib.sha256(json.dumps([step, mesh.as_dict(), tensors]).encode()).hexdigest()

        digests = self._run_on_all(digest)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise RunError(f"ranks 0 and {other} are saving different networks or steps", f"rank {other}")
        return made[0]

    def _has_valid_checkpoint(self, target: Path, contents: Contents) -> bool:
        """Returns True if this writer already has a valid checkpoint `target`. If not, rank 0 checks the free space."""
        if self.group.rank in self.group.writers and folders.is_intact(target):
            return True
        if self.group.rank == 0:
            self._prepare_folder(contents)
        return False

    def _prepare_folder(self, contents: Contents) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_to_disk(self.folder.parent)
        refuse_too_little_space(self.folder, contents.size_bytes())

    def _write_pieces(self, target: Path, contents: Contents) -> None:
        with ExitStack() as stack:
            staged = self._shared_folder(stack, contents.step)
            own = self._run_on_all(lambda: contents.write_pieces(staged, self.group.rank))

            def finish() -> None:
                if self.group.rank == 0:
                    (staged / files.TOKEN).unlink()
                    contents.finish(staged, {name: entry for one in own for name, entry in one.items()}, pieces=True)
                    folders.commit_folder(staged, target)
                    folders.mark_intact(target)

            self._run_on_all(finish)

    def _shared_folder(self, stack: ExitStack, step: int) -> Path:
        """Creates a staging folder on rank 0. Checks with a token file that all ranks see it. A collective."""

        def stage() -> list[str]:
            if self.group.rank != 0:
                return []
            staged = stack.enter_context(folders.staging_folder(self.folder, step))
            token = os.urandom(16).hex()
            (staged / files.TOKEN).write_text(token)
            return [staged.name, token]

        name, token = self._run_on_all(stage)[0]
        staged = self.folder / name

        def check_token() -> None:
            file = staged / files.TOKEN
            if not file.is_file() or file.read_text() != token:
                what = f"rank {self.group.rank} can't see rank 0's checkpoint folder"
                hints = ("move --out to a disk that all machines share", "or save without checkpoint.pieces")
                raise UserError(what, str(self.folder), hints)

        self._run_on_all(check_token)
        return staged

    def _write_unsharded(self, target: Path, contents: Contents, *, writes: bool) -> None:
        assembled = self._assemble_tensors(contents)
        failed: list[OSError] = []

        def write_or_send() -> None:
            try:
                if writes:
                    self._prepare_folder(contents)
                    with folders.staging_folder(self.folder, contents.step) as staged:
                        replace(contents, fetch=lambda *_: next(assembled)).write_unsharded(staged)
                        folders.commit_folder(staged, target)
                    folders.mark_intact(target)
            except OSError as error:
                if self.group.rank == 0:
                    raise
                failed.append(error)  # only this writer's copy is missing
            finally:
                # The other ranks send all shards, even if a writer's disk is full.
                for _ in assembled:
                    pass

        self._run_on_all(write_or_send)
        if failed:
            raise save_error(self.folder, failed[0]) from failed[0]

    def _assemble_tensors(self, contents: Contents) -> Iterator[Tensor]:
        """Yields each unsharded tensor, shaped as its view, in file order on writers, nothing elsewhere. A collective.

        The writers take turns to receive shards, from ranks on their machine where possible. No reference to a tensor
        is kept while the next one is assembled.
        """
        for kind, tensors in contents.tensors.items():
            for name in in_file_order(unsharded_specs(tensors)):
                for writer, near in self.group.writers.items():
                    regions = tensors[name].layout.nearest_holders(contents.mesh, near)
                    if self.group.rank == writer:
                        yield self._receive_tensor(contents, kind, name, regions)
                    elif self.group.rank in regions:
                        region = regions[self.group.rank]
                        piece = contents.fetch(kind, name, region)
                        for block in _divide_region(region, tensors[name].dtype.item_bytes):
                            if (values := piece[read.region_slices(block, region)]).numel():
                                dist.send(_as_bytes(values).to(self.group.device), dst=writer)

    def _receive_tensor(self, contents: Contents, kind: str, name: str, regions: dict[int, Region]) -> Tensor:
        described = contents.tensors[kind][name]
        if not described.layout.cuts and self.group.rank in regions:
            return contents.fetch(kind, name, regions[self.group.rank])
        dtype = read.torch_type(described.dtype)
        assembled = torch.empty(described.layout.view, dtype=dtype)
        for rank, region in regions.items():
            if rank == self.group.rank:
                assembled[read.region_slices(region)] = contents.fetch(kind, name, region)
                continue
            for block in _divide_region(region, dtype.itemsize):
                count = math.prod(shape_of(block)) * dtype.itemsize
                buffer = torch.empty(count, dtype=torch.uint8, device=self.group.device)
                if count:
                    dist.recv(buffer, src=rank)
                assembled[read.region_slices(block)] = buffer.cpu().view(dtype).reshape(shape_of(block))
        return assembled


def _divide_region(region: Region, item_bytes: int) -> Iterator[Region]:
    """Divides a region into blocks of about 4 MiB, to send one at a time, which limits memory use."""
    sizes = shape_of(region)
    if not sizes:
        yield region
        return
    longest = sizes.index(max(sizes))
    start, stop = region[longest]
    step = max(1, _BLOCK_BYTES * (stop - start) // max(1, math.prod(sizes) * item_bytes))
    for first in range(start, stop, step):
        yield (*region[:longest], (first, min(first + step, stop)), *region[longest + 1 :])


def local_contents(step: int, snapshot: Snapshot, network_layout: NetworkLayout, rank: int) -> Contents:
    """Returns what a rank writes. Raises RunError if shards don't fit the layouts, TypeError for non-plain data."""
    _refuse_partly_sharded_ties(snapshot.model, network_layout)
    held: dict[str, Mapping[str, Tensor]] = {MODEL: snapshot.model}
    owners = {name: name for name in snapshot.model}
    texts = {files.STATE: files.json_text(snapshot.state)}
    if snapshot.optimizer is not None:
        branches, held[OPTIMIZER] = flatten_optimizer(snapshot.optimizer)
        texts[files.OPTIMIZER_PLAN] = files.json_text(branches)
        owners |= tensor_owners(branches)
    tensors = {
        kind: {name: _entry_for(name, one, owners.get(name, ""), network_layout, rank) for name, one in named.items()}
        for kind, named in held.items()
    }

    def fetch(kind: str, name: str, region: Region) -> Tensor:
        return held[kind][name].detach().reshape(shape_of(region))

    return Contents(step, network_layout.mesh, tensors, texts, fetch)


def _refuse_partly_sharded_ties(model: Mapping[str, Tensor], network_layout: NetworkLayout) -> None:
    layouts = network_layout.layouts.items()
    pieces = {model[name].data_ptr(): name for name, layout in layouts if layout.cuts and name in model}
    for name, tensor in model.items():
        other = pieces.get(tensor.data_ptr())
        if other is not None and name not in network_layout.layouts and tensor.numel():
            raise RunError(f"{name} is tied to the sharded {other}, but has no layout", name)


def _entry_for(name: str, tensor: Tensor, owner: str, network_layout: NetworkLayout, rank: int) -> describe.TensorEntry:
    """Describes a tensor. It has the layout of its parameter `owner` if the shapes match, else it is unsharded."""
    shape = tuple(tensor.shape)
    layout = network_layout.layouts.get(owner) or unsharded_layout(shape)
    expected = layout.local_shape(network_layout.mesh, rank)
    if shape == expected:
        return read.describe_tensor(tensor, layout)
    # A step count is equal on all ranks. Other state of a sharded parameter could be sharded in any way.
    if name != owner and (tensor.ndim == 0 or not layout.cuts):
        return read.describe_tensor(tensor)
    what = f"rank {rank} holds {list(shape)} of {name}, but the layout expects {list(expected)}"
    hints = ("use sgd or adamw, or don't shard: this optimizer's state can't be sharded like the parameters",)
    raise RunError(what, name, hints)
