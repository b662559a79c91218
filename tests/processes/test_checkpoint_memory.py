"""No process ever holds more than its own share and one tensor: read from the system, in processes of their own."""

import ctypes
import gc
import re
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.read import open_checkpoint
from manyhands.checkpoint.reshard import merge, reshard
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.core.mesh import Mesh, TensorLayout
from tests.processes.ranks import run_on_ranks
from tests.processes.test_checkpoint_pieces import peers_of, save_full, save_pieces

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of memory")

COUNT, ROWS, COLUMNS = 8, 2048, 4096
MIB = 1 << 20
TENSOR_BYTES = ROWS * COLUMNS * 4
ALL_BYTES = COUNT * TENSOR_BYTES
# Buffers of the disk, of gloo and of the digests, and a part of a tensor that is being sent.
SLACK_BYTES = 16 * MIB
TWO = (("tp", 2),)


def _status_bytes(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _give_back_what_is_free():
    """Has the C library return all freed memory to the system at once, so that resident means in use."""
    library = ctypes.CDLL(None)
    threshold = -3
    library.mallopt(threshold, 64 * 1024)
    library.malloc_trim(0)


def _growth(work):
    """How far this process's resident memory rises above where it was, mapped files included.

    Only in a process with a memory of its own: one that was forked takes what its parent had freed, and nothing grows.
    """
    gc.collect()
    _give_back_what_is_free()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _cut(axes, dim, view=None):
    shape = (ROWS, COLUMNS)
    lies = TensorLayout(shape, view or shape, ((dim, tuple(range(len(axes)))),))
    return NetworkLayout(Mesh(axes), {f"layer{n}": lies for n in range(COUNT)})


def _together(world, folder):
    """Saving and loading by two processes: what each needs beside what it had before."""
    cut, peers = _cut(TWO, 1), peers_of(world)
    held = {f"layer{n}": torch.full((ROWS, COLUMNS // 2), float(n * 10 + world.rank)) for n in range(COUNT)}
    grown = {}
    for name, how in (("pieces", save_pieces), ("whole", save_full)):
        snapshot = Snapshot(held, None, {"step": 1})
        grown[f"save {name}"] = _growth(lambda how=how, name=name, s=snapshot: how(folder / name, 1, s, cut, peers))
    snapshot = held = None
    for name in ("pieces", "whole"):
        for dim in (0, 1):
            path, other = folder / name / "step-00000001", _cut(TWO, dim)
            grown[f"load {name} by {dim}"] = _growth(lambda p=path, c=other: _load(p, c, world.rank))
    return grown


def _load(path, cut, rank):
    loaded = open_checkpoint(path).snapshot(cut, rank).model
    assert sum(tensor.nbytes for tensor in loaded.values()) == ALL_BYTES // 2
    assert {float(loaded["layer3"][0, 0]), float(loaded["layer3"][-1, -1])} <= {30.0, 31.0}


def _offline(folder):
    """One process that cuts a checkpoint otherwise: also where views differ, so that each tensor is put together."""
    views, rowwise = _cut((("dp", 2), ("tp", 2)), 1, (ROWS, 8, COLUMNS // 8)), _cut((("a", 3),), 0)
    steps = {
        "reshard to another view": lambda: reshard(
            open_checkpoint(folder / "pieces" / "step-00000001"), folder / "views", views
        ),
        "reshard back": lambda: reshard(open_checkpoint(folder / "views"), folder / "rows", rowwise),
        "merge": lambda: merge(open_checkpoint(folder / "rows"), folder / "one.safetensors"),
    }
    return {name: _growth(step) for name, step in steps.items()}


def _measure(world, folder):
    """Twice, and the second time counts: pages of libraries that work touches for the first time look like growth."""
    for turn in ("first", "second"):
        own = Path(folder) / turn
        grown = _together(world, own)
        if world.rank == 0:
            grown |= _offline(own)
    return grown


@pytest.mark.slow
def test_a_process_holds_its_share_and_one_tensor(tmp_path):
    for grown in run_on_ranks(_measure, 2, str(tmp_path), start="spawn"):
        print({name: f"{growth / MIB:.0f} MiB" for name, growth in grown.items()})
        for name, growth in grown.items():
            # While saving, the share is there before. A view that is cut anew lies beside the tensor it comes from.
            most = TENSOR_BYTES * (2 if "view" in name or "back" in name else 1) + SLACK_BYTES
            if name.startswith("load"):
                assert growth > ALL_BYTES // 2 * 0.9, f"{name}: nothing was measured"
                most = ALL_BYTES // 2 + TENSOR_BYTES + SLACK_BYTES
            assert growth < most, f"{name}: {growth / MIB:.0f} MiB"
