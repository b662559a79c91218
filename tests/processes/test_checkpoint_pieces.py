"""What split networks save together: bit-equal from any layout and number to any other, or a clear refusal.

No process ever holds more than its own share and one tensor: read from the system, in processes of their own.
"""

import ctypes
import functools
import gc
import itertools
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.files import verify_checkpoint
from manyhands.checkpoint.folders import newest_checkpoint, prune_checkpoints
from manyhands.checkpoint.read import load_checkpoint, open_checkpoint
from manyhands.checkpoint.reshard import merge, reshard
from manyhands.checkpoint.snapshot import Snapshot, read_tensors
from manyhands.checkpoint.write import CheckpointGroup, CheckpointWriter, SaveError, save_unsharded
from manyhands.core.errors import ManyhandsError
from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.parallel.group.plain import gather_plain
from tests.checkpoint.cuts import assert_same, bits, local, random_tensor, with_optimizer
from tests.processes.ranks import run_on_ranks

SIZES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(1, 2, 2)]}
SHAPES = {
    "conv.weight": ((7, 5, 3, 3), torch.float32, None),
    "attention.in_proj": ((3 * 5 * 2, 4), torch.float64, (3, 5, 2, 4)),
    "fc.weight": ((9, 6), torch.bfloat16, None),
    "fc.bias": ((9,), torch.bfloat16, None),
    "mask": ((5, 3), torch.bool, None),
    "tracked": ((), torch.int64, None),
    "nothing": ((0, 3), torch.float32, None),
}


def whole_snapshot(step=5):
    model = {name: random_tensor(shape, kind, seed) for seed, (name, (shape, kind, _)) in enumerate(SHAPES.items())}
    snapshot = with_optimizer(model)
    return Snapshot(model, snapshot.optimizer, {"step": step, "best": {"step": step}})


def layout_of(sizes, turn):
    """A layout over a mesh of some sizes; `turn` deals the axes to other dimensions."""
    mesh = Mesh(tuple(zip("abc", sizes, strict=False)))
    layouts = {}
    for number, (name, (shape, _, view)) in enumerate(SHAPES.items()):
        view = view or shape
        if view and name != "fc.bias":
            owner = {axis: (axis + number + turn) % (len(view) + turn) for axis in range(len(sizes))}
            dims = sorted({dim for dim in owner.values() if dim < len(view)})
            cuts = tuple((dim, tuple(axis for axis, chosen in owner.items() if chosen == dim)) for dim in dims)
            layouts[name] = TensorLayout(shape, view, cuts)
    return NetworkLayout(mesh, layouts)


def layouts_for(size):
    return [layout_of(sizes, turn) for sizes in SIZES[size] for turn in (0, 1)]


def peers_of(world):
    return CheckpointGroup(world.rank, world.size, functools.partial(gather_plain, world=world))


def save_pieces(folder, step, snapshot, layout, peers):
    return CheckpointWriter(folder, peers, layout, pieces=True).write(step, snapshot)


def save_full(folder, step, snapshot, layout, peers):
    return CheckpointWriter(folder, peers, layout).write(step, snapshot)


def _mine(world, layout):
    """A rank's pieces; the state is rank 0's to know."""
    mine = local(whole_snapshot(), layout, world.rank)
    return mine if world.rank == 0 else Snapshot(mine.model, mine.optimizer, {})


def _save_all(world, folder):
    return [
        str(how(folder / f"{how.__name__}-{number}", 5, _mine(world, layout), layout, peers_of(world)))
        for number, layout in enumerate(layouts_for(world.size))
        for how in (save_pieces, save_full)
    ]


@pytest.mark.slow
def test_saved_under_every_layout_by_every_number(tmp_path):
    """tests/checkpoint/test_pieces.py has that such a checkpoint loads into every other layout."""
    paths = [path for size in SIZES for path in run_on_ranks(_save_all, size, tmp_path / str(size))[0]]
    assert len(paths) == 16
    existing = save_unsharded(tmp_path / "alone", 5, whole_snapshot())
    for path in map(Path, paths):
        verify_checkpoint(path)
        assert_same(load_checkpoint(path), whole_snapshot())
        if "save_full" in str(path):
            for name in (files.MODEL, files.OPTIMIZER):
                ours, theirs = read_tensors(path / name), read_tensors(existing / name)
                assert [(key, bits(tensor)) for key, tensor in ours.items()] == [
                    (key, bits(tensor)) for key, tensor in theirs.items()
                ]
            for name in (files.OPTIMIZER_PLAN, files.STATE):
                assert (path / name).read_bytes() == (existing / name).read_bytes()


def _try(how, world, folder, *, snapshot=None, limit_bytes=None, layout=None):
    """What a process got: a path, or the error's class and text; a limit of its files is a disk that is full for it."""
    layout = layout or layouts_for(world.size)[0]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard[1]))
    try:
        return str(how(folder, 5, snapshot or local(whole_snapshot(), layout, world.rank), layout, peers_of(world)))
    except (ManyhandsError, TypeError) as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, hard)


SPOILT = {
    "not finite": (lambda given: given.model["conv.weight"].view(-1)[0].fill_(torch.nan), "conv.weight has 1 of"),
    "another type": (lambda given: given.model.update({"fc.bias": torch.zeros(9).double()}), "different networks"),
    "not plain": (lambda given: given.state.update(object=object()), "not JSON serializable"),
    "another shape": (lambda given: given.model.update({"conv.weight": torch.zeros(1)}), "but the layout expects"),
}


def _journeys(world, folder):
    """What goes wrong, and that the next attempt is sound: by what was tried, both answers.

    A disk that is full for one process; a rank whose snapshot is spoilt; another mesh; a disk of each process's own.
    """
    found = {}
    for how, bad in ((save_pieces, 1), (save_pieces, 0), (save_full, 0)):
        place = folder / f"full {how.__name__} {bad}"
        failed = _try(how, world, place, limit_bytes=100 if world.rank == bad else None)
        found[place.name] = failed, "training can continue", _try(how, world, place)
    for how in (save_pieces, save_full):
        for name, (spoil, said) in SPOILT.items():
            place = folder / f"{how.__name__} {name}"
            mine = local(whole_snapshot(), layouts_for(world.size)[0], world.rank)
            if world.rank == 1:
                spoil(mine)
            failed = _try(how, world, place, snapshot=mine)
            found[place.name] = failed, said, _try(how, world, place)
    place = folder / "mesh"
    failed = _try(save_pieces, world, place, layout=layout_of((4,), 0))
    found["mesh"] = failed, "a=4", _try(save_pieces, world, place)
    own = folder / "apart" / str(world.rank)
    own.mkdir(parents=True)
    failed = _try(save_pieces, world, own)
    found["apart/0"] = failed, "rank 1 can't see rank 0's checkpoint folder", _try(save_full, world, own)
    return found


def test_what_is_wrong_on_one_process_is_said_on_all_and_what_is_saved_next_is_sound(tmp_path):
    for found in run_on_ranks(_journeys, 3, tmp_path):
        for name, ((kind, text), said, again) in found.items():
            assert said in text, name
            assert kind == SaveError.__name__ or not name.startswith("full"), name
            assert isinstance(again, str), name
            assert_same(load_checkpoint(tmp_path / name / "step-00000005"), whole_snapshot())
            assert [entry.name for entry in (tmp_path / name).iterdir()] == ["step-00000005"], name
            assert not (tmp_path / name / "step-00000005" / "shared.token").exists(), name
        assert (found["mesh"][0][0], found["apart/0"][0][0]) == ("RunError", "UserError")
        assert "save without checkpoint.pieces" in found["apart/0"][0][1]
    assert [len(list((tmp_path / "apart" / str(rank)).iterdir())) for rank in range(3)] == [1, 0, 0]


def _on_two_disks(world, folder, *cases):
    """Saves step 5 under every layout, on a disk of each process's own; that of rank `full` is full at first."""
    got = []
    for case, (writers, full) in enumerate(cases):
        for number, layout in enumerate(layouts_for(world.size)):

            def how(folder, step, snapshot, layout, peers, writers=writers):
                return save_full(folder, step, snapshot, layout, replace(peers, writers=writers))

            own, limit = folder / str(case) / str(number) / str(world.rank), 100 if world.rank == full else None
            first = _try(how, world, own, layout=layout, limit_bytes=limit)
            got.append((case, own, first, _try(how, world, own, layout=layout)))
    return got


def test_machines_that_share_no_disk_both_have_all(tmp_path):
    cases = [{0: range(2), 2: range(2, 4)}, {0: range(1), 1: range(1, 4)}]
    for rank, got in enumerate(run_on_ranks(_on_two_disks, 4, tmp_path, *((writers, None) for writers in cases))):
        for case, own, *_ in got:
            assert own.exists() == (rank in cases[case])
            if rank in cases[case]:
                assert_same(load_checkpoint(own / "step-00000005"), whole_snapshot())


def test_a_full_disk_on_one_of_two_machines(tmp_path):
    """The first one's costs the checkpoint, the second one's its copy alone; what is saved next is on both."""
    writers = {0: range(1), 1: range(1, 2)}
    for rank, got in enumerate(run_on_ranks(_on_two_disks, 2, tmp_path, (writers, 0), (writers, 1))):
        for full, own, first, second in got:
            assert isinstance(first, str) == (full == 1 and rank == 0)
            assert isinstance(first, str) or first[0] == SaveError.__name__
            assert_same(load_checkpoint(Path(second)), whole_snapshot())
            assert [entry.name for entry in own.iterdir()] == ["step-00000005"]


def _dying(world, folder, how, moment):
    """Saves step 5; then rank 1 ends in the middle of saving step 6, at its so-many-th word with the others."""
    layout = layouts_for(world.size)[0]
    mine = local(whole_snapshot(), layout, world.rank)
    how(folder, 5, mine, layout, peers_of(world))
    words = []

    def gather(value):
        words.append(value)
        if world.rank == 1 and len(words) == moment:
            os._exit(3)
        return gather_plain(value, world)

    how(folder, 6, mine, layout, CheckpointGroup(world.rank, world.size, gather))


@pytest.mark.parametrize(("how", "moments"), [(save_pieces, range(1, 6)), (save_full, range(1, 4))])
def test_a_process_that_dies_leaves_the_older_checkpoint(tmp_path, how, moments):
    for moment in moments:
        folder = tmp_path / str(moment)
        with pytest.raises(AssertionError):
            run_on_ranks(_dying, 3, folder, how, moment)
        path, passed_over = newest_checkpoint(folder)
        assert passed_over == []
        assert_same(load_checkpoint(path), whole_snapshot())
        # At its last word all is written: rank 0 may have committed by then.
        assert path.name == "step-00000005" or moment == max(moments)
        prune_checkpoints(folder, 2, None)
        assert all(files.step_of(entry) for entry in folder.iterdir())


COUNT, ROWS, COLUMNS = 8, 2048, 4096
MIB = 1 << 20
TENSOR_BYTES = ROWS * COLUMNS * 4
ALL_BYTES = COUNT * TENSOR_BYTES
# Buffers of the disk, of gloo and of the digests, and a part of a tensor that is being sent.
SLACK_BYTES = 16 * MIB


def _status_bytes(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _growth(work):
    """How far resident memory rises above where it was, mapped files included.

    Only in a process with a memory of its own: one that was forked takes what its parent had freed, and nothing grows.
    """
    gc.collect()
    # Has the C library return all freed memory to the system at once, so that resident means in use.
    library, threshold = ctypes.CDLL(None), -3
    library.mallopt(threshold, 64 * 1024)
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _cut(axes, dim, view=(ROWS, COLUMNS)):
    lies = TensorLayout((ROWS, COLUMNS), view, ((dim, tuple(range(len(axes)))),))
    return NetworkLayout(Mesh(axes), {f"layer{n}": lies for n in range(COUNT)})


def _load_share(path, dim, rank):
    loaded = open_checkpoint(path / "step-00000001").snapshot(_cut((("tp", 2),), dim), rank).model
    assert sum(tensor.nbytes for tensor in loaded.values()) == ALL_BYTES // 2
    assert {float(loaded["layer3"][0, 0]), float(loaded["layer3"][-1, -1])} <= {30.0, 31.0}


def _measure(world, place):
    """What two processes need beside what each had before, to save, to load, and one of them to cut otherwise.

    Also where views differ, so that each tensor is put together.
    """
    held = {f"layer{n}": torch.full((ROWS, COLUMNS // 2), float(n * 10 + world.rank)) for n in range(COUNT)}
    snapshot, grown, hows = Snapshot(held, None, {"step": 1}), {}, (save_pieces, save_full)
    for how in hows:
        save = functools.partial(how, place / how.__name__, 1, snapshot, _cut((("tp", 2),), 1), peers_of(world))
        grown[how.__name__] = _growth(save)
    snapshot = held = save = None
    for how, dim in itertools.product(hows, (0, 1)):
        load = functools.partial(_load_share, place / how.__name__, dim, world.rank)
        grown[f"load from {how.__name__} by {dim}"] = _growth(load)
    if world.is_main:
        views, rowwise = _cut((("dp", 2), ("tp", 2)), 1, (ROWS, 8, COLUMNS // 8)), _cut((("a", 3),), 0)
        pieces = place / "save_pieces" / "step-00000001"
        for name, step in {
            "reshard to another view": lambda: reshard(open_checkpoint(pieces), place / "views", views),
            "reshard back": lambda: reshard(open_checkpoint(place / "views"), place / "rows", rowwise),
            "merge": lambda: merge(open_checkpoint(place / "rows"), place / "one.safetensors"),
        }.items():
            grown[name] = _growth(step)
    return grown


def _measure_twice(world, folder):
    """The second time counts: pages of libraries that work touches for the first time look like growth."""
    return [_measure(world, folder / turn) for turn in ("first", "second")][-1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of memory")
def test_a_process_holds_its_share_and_one_tensor(tmp_path):
    for grown in run_on_ranks(_measure_twice, 2, tmp_path, start="spawn"):
        for name, growth in grown.items():
            # While saving, the share is there before. A view that is cut anew lies beside the tensor it comes from.
            most = TENSOR_BYTES * (2 if "view" in name or "back" in name else 1) + SLACK_BYTES
            if name.startswith("load"):
                assert growth > ALL_BYTES // 2 * 0.9, f"{name}: nothing was measured"
                most = ALL_BYTES // 2 + TENSOR_BYTES + SLACK_BYTES
            assert growth < most, f"{name}: {growth / MIB:.0f} MiB"
