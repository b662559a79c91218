"""Writes a checkpoint's files, one tensor at a time, whole or in pieces; wherever the tensors come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint import layout
from manyhands.checkpoint.pieces import (
    MODEL,
    OPTIMIZER,
    Region,
    Tensors,
    describe_pieces,
    first_held,
    size_of,
    whole_region,
)
from manyhands.checkpoint.stream import Spec, torch_type, write_stream
from manyhands.core.files import sync
from manyhands.core.mesh import Mesh

# (kind, name, region) -> the values there, in the shape of the region.
Fetch = Callable[[str, str, Region], Tensor]
Files = dict[str, Any]
WHOLE_NAMES = {MODEL: layout.MODEL, OPTIMIZER: layout.OPTIMIZER}


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
        file = staged / layout.piece_name(kind, rank, contents.mesh.size)

        def fetch(name: str, kind: str = kind, regions: dict[str, Region] = regions) -> Tensor:
            return contents.fetch(kind, name, regions[name])

        specs = [Spec(name, torch_type(tensors[name].dtype), size_of(region)) for name, region in regions.items()]
        write_stream(file, specs, fetch)
        written[file.name] = _seal(file)
    return written


def finish_pieces(staged: Path, contents: Contents, written: Files) -> None:
    """Writes what is written once, the manifest last; `written` is what `write_pieces` returned, of all ranks."""
    texts = {layout.PIECES: layout.text(describe_pieces(contents.mesh, contents.tensors)), **contents.texts}
    _write_manifest(staged, contents.step, {**_write_texts(staged, texts), **written}, layout.PIECES_FORMAT)


def write_atomic(staged: Path, contents: Contents) -> None:
    """Writes a checkpoint whole, the manifest last."""
    written = _write_texts(staged, contents.texts)
    for kind in contents.tensors:
        file = staged / WHOLE_NAMES[kind]
        write_file_atomic(file, contents, kind)
        written[file.name] = _seal(file)
    _write_manifest(staged, contents.step, written, layout.FORMAT)


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
    return {"size": file.stat().st_size, "sha256": layout.digest(file)}


def _write_manifest(staged: Path, step: int, files: dict[str, Any], number: int) -> None:
    """Writes a staged folder's last file; `files` is what `_seal` returned of each other one, `number` the format's."""
    manifest = {"format": number, "step": step, "torch": torch.__version__, "manyhands": _own_version()}
    (staged / layout.MANIFEST).write_bytes(layout.manifest_text({**manifest, "files": files}))
    sync(staged / layout.MANIFEST)


def _own_version() -> str:
    try:
        return version("manyhands")
    except PackageNotFoundError:
        return "unknown"
