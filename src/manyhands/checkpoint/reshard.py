"""Rewrites checkpoints with another sharding, one tensor at a time, in one process and without the network's code."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from manyhands.checkpoint import describe, files, folders, read, snapshot
from manyhands.checkpoint.write import Contents, Files, refuse_too_little_space, save_error
from manyhands.core.errors import UserError
from manyhands.core.files import replaced_on_success, sync_to_disk
from manyhands.core.plan_record import read_plan_record

SAFETENSORS, PICKLED = (".safetensors",), (".pth", ".pt")
_UNKNOWN = (".tar", ".bin", ".ckpt", ".pkl", ".zip", ".json", ".npz", ".onnx")


def read_network_layout(file: Path) -> describe.NetworkLayout:
    """Reads the mesh and the layouts of a plan.json. Raises UserError if the plan lacks them."""
    record = read_plan_record(file)
    for key in ("mesh", "layouts"):
        if getattr(record, key) is None or key not in record.model_fields_set:
            hints = ('give "mesh": {"dp": 2, "tp": 2} and "layouts": {name: layout}, as in a run\'s plan',)
            raise UserError(f'the plan has no "{key}"', str(file), hints)
    return describe.NetworkLayout(*record.mesh_and_layouts(str(file)))


def refuse_existing(target: Path) -> None:
    """Raises UserError if the target exists or its parent folder is missing."""
    if os.path.lexists(target):
        raise UserError(f"{target} already exists", str(target), ("choose another name, or remove the target first",))
    if not target.absolute().parent.is_dir():
        parent = target.absolute().parent
        raise UserError(f"there is no folder {parent}", str(target), (f"create the folder: mkdir -p {parent}",))


def reshard(source: read.Source, target: Path, network_layout: describe.NetworkLayout) -> None:
    """Writes a checkpoint folder with another sharding. Raises UserError, or SaveError if the disk is full or fails."""
    contents = _resharded_contents(source, network_layout)

    def write(staged: Path) -> None:
        written: Files = {}
        for rank in range(network_layout.mesh.size):
            written |= contents.write_pieces(staged, rank)
        contents.finish(staged, written, pieces=True)

    _write_and_commit(target, contents, write)


def merge(source: read.Source, target: Path) -> None:
    """Writes an unsharded checkpoint folder, or only weights (.pth, .safetensors). Raises the errors of `reshard`."""
    contents = _resharded_contents(source, describe.NetworkLayout())
    if target.name.endswith(_UNKNOWN):
        hints = ("end the name in .safetensors or .pth, or give a checkpoint folder's name without a suffix",)
        raise UserError(f"{target.name} has an unsupported file type", str(target), hints)

    def write(part: Path) -> None:
        if target.name.endswith(SAFETENSORS):
            contents.write_file(part, describe.MODEL)
        elif target.name.endswith(PICKLED):
            tensors = {name: source.model.read(name) for name in source.model.names()}
            torch.save(tensors | snapshot.unflatten(source.state.get(snapshot.EXTRA_STATE, {}), {}), part)
        else:
            contents.write_unsharded(part)

    _write_and_commit(target, contents, write)


def is_single_file(target: Path) -> bool:
    return target.name.endswith(SAFETENSORS + PICKLED)


def _resharded_contents(source: read.Source, network_layout: describe.NetworkLayout) -> Contents:
    layouts, kinds = source.layouts(network_layout), source.stored
    tensors = {
        kind: {name: describe.TensorEntry(entry.dtype, layouts[kind][name]) for name, entry in stored.described.items()}
        for kind, stored in kinds.items()
    }
    texts = {files.STATE: files.json_text(source.state)}
    if source.optimizer is not None:
        texts[files.OPTIMIZER_PLAN] = files.json_text(source.branches)

    def fetch(kind: str, name: str, region: describe.Region) -> torch.Tensor:
        return kinds[kind].read(name, layouts[kind][name].view, region)

    return Contents(int(source.state.get("step", 0)), network_layout.mesh, tensors, texts, fetch)


def _write_and_commit(target: Path, contents: Contents, write: Callable[[Path], None]) -> None:
    single, above = is_single_file(target), target.absolute().parent
    refuse_existing(target)
    try:
        refuse_too_little_space(above, contents.size_bytes([describe.MODEL] if single else describe.KINDS))
        with replaced_on_success(target) if single else folders.staging_folder(above, contents.step) as part:
            write(part)
            if single:
                sync_to_disk(part)
            refuse_existing(target)
            if not single:
                folders.commit_folder(part, target.absolute())
        sync_to_disk(above)
    except OSError as error:
        raise save_error(target, error) from error
