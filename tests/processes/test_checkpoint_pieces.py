"""What split networks save together: bit-equal from any layout and number to any other, or a clear refusal."""

import functools
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import NetworkLayout
from manyhands.checkpoint.files import verify
from manyhands.checkpoint.folders import newest, prune
from manyhands.checkpoint.read import load, open_checkpoint
from manyhands.checkpoint.snapshot import Snapshot, read_tensors
from manyhands.checkpoint.write import CheckpointGroup, CheckpointWriter, SaveError, save
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


def _load_all(world, paths):
    for path in paths:
        source = open_checkpoint(Path(path))
        for layout in layouts_for(world.size):
            assert_same(source.snapshot(layout, world.rank), local(whole_snapshot(), layout, world.rank))
    return len(paths)


@pytest.mark.slow
def test_from_every_layout_and_number_to_every_other(tmp_path):
    paths = [path for size in SIZES for path in run_on_ranks(_save_all, size, tmp_path / str(size))[0]]
    assert len(paths) == 16
    existing = save(tmp_path / "alone", 5, whole_snapshot())
    for path in map(Path, paths):
        verify(path)
        assert_same(load(path), whole_snapshot())
        if "save_full" in str(path):
            for name in (files.MODEL, files.OPTIMIZER):
                ours, theirs = read_tensors(path / name), read_tensors(existing / name)
                assert [(key, bits(tensor)) for key, tensor in ours.items()] == [
                    (key, bits(tensor)) for key, tensor in theirs.items()
                ]
            for name in (files.OPTIMIZER_PLAN, files.STATE):
                assert (path / name).read_bytes() == (existing / name).read_bytes()
    for size in SIZES:
        assert run_on_ranks(_load_all, size, paths) == [len(paths)] * size


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


def _not_finite(snapshot):
    snapshot.model["conv.weight"].view(-1)[0] = float("nan")


def _another_type(snapshot):
    snapshot.model["fc.bias"] = snapshot.model["fc.bias"].double()


def _not_plain(snapshot):
    snapshot.state["object"] = object()


def _another_shape(snapshot):
    snapshot.model["conv.weight"] = torch.zeros(1)


SPOILT = {
    _not_finite: "conv.weight has 1 of",
    _another_type: "different networks",
    _not_plain: "not JSON serializable",
    _another_shape: "but the layout expects",
}


def _journeys(world, folder):
    """What goes wrong, and that the next attempt is sound: by what was tried, both answers.

    A disk that is full for one process; a rank whose snapshot is spoilt; another mesh.
    """
    found = {}
    for how, bad in ((save_pieces, 1), (save_pieces, 0), (save_full, 0)):
        place = folder / f"full {how.__name__} {bad}"
        failed = _try(how, world, place, limit_bytes=100 if world.rank == bad else None)
        found[place.name] = failed, "training can continue", _try(how, world, place)
    for how in (save_pieces, save_full):
        for spoil, said in SPOILT.items():
            place = folder / f"{how.__name__} {spoil.__name__}"
            mine = local(whole_snapshot(), layouts_for(world.size)[0], world.rank)
            if world.rank == 1:
                spoil(mine)
            failed = _try(how, world, place, snapshot=mine)
            found[place.name] = failed, said, _try(how, world, place)
    place = folder / "mesh"
    failed = _try(save_pieces, world, place, layout=layout_of((4,), 0))
    found["mesh"] = failed, "a=4", _try(save_pieces, world, place)
    return found


def test_what_is_wrong_on_one_process_is_said_on_all_and_what_is_saved_next_is_sound(tmp_path):
    for found in run_on_ranks(_journeys, 3, tmp_path):
        for name, ((kind, text), said, path) in found.items():
            assert said in text, name
            assert kind == SaveError.__name__ or not name.startswith("full"), name
            assert_same(load(Path(path)), whole_snapshot())
            assert [entry.name for entry in (tmp_path / name).iterdir()] == ["step-00000005"], name
        assert found["mesh"][0][0] == "RunError"


def _elsewhere(world, folder):
    own = folder / str(world.rank)
    own.mkdir()
    pieces = _try(save_pieces, world, own)
    return pieces, _try(save_full, world, own)


def test_without_a_shared_disk_pieces_are_refused_and_full_tensors_are_saved(tmp_path):
    for (kind, text), _ in run_on_ranks(_elsewhere, 3, tmp_path):
        assert kind == "UserError"
        assert "rank 1 can't see rank 0's checkpoint folder" in text
        assert "save without checkpoint.pieces" in text
    assert_same(load(tmp_path / "0" / "step-00000005"), whole_snapshot())
    assert [len(list((tmp_path / str(rank)).iterdir())) for rank in range(3)] == [1, 0, 0]


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
                assert_same(load(own / "step-00000005"), whole_snapshot())


def test_a_full_disk_on_one_of_two_machines(tmp_path):
    """The first one's costs the checkpoint, the second one's its copy alone; what is saved next is on both."""
    writers = {0: range(1), 1: range(1, 2)}
    for rank, got in enumerate(run_on_ranks(_on_two_disks, 2, tmp_path, (writers, 0), (writers, 1))):
        for full, own, first, second in got:
            assert isinstance(first, str) == (full == 1 and rank == 0)
            assert isinstance(first, str) or first[0] == SaveError.__name__
            assert_same(load(Path(second)), whole_snapshot())
            assert [entry.name for entry in own.iterdir()] == ["step-00000005"]


def _opened(world, path):
    """What each process says of a checkpoint."""
    try:
        open_checkpoint(path)
    except ManyhandsError as error:
        return type(error).__name__, str(error)
    return None


def _torn(world, folder):
    """What is said of a checkpoint of which a file is changed or missing, by file and fault, and of the sound one."""
    path, peers = Path(_try(save_pieces, world, folder)), peers_of(world)
    found, contents = [], {file: file.read_bytes() for file in sorted(path.iterdir())}
    for file, content in contents.items():
        for spoilt in (content[:-1] + bytes([content[-1] ^ 1]), None):
            peers.gather("read")
            if world.is_main:
                file.unlink() if spoilt is None else file.write_bytes(spoilt)
            peers.gather("torn")
            found.append((file.name, _opened(world, path)))
            peers.gather("opened")
            if world.is_main:
                file.write_bytes(content)
    peers.gather("restored")
    return found, _opened(world, path), _opened(world, folder / "nowhere")


@pytest.mark.slow
def test_a_torn_piece_is_named_on_every_process(tmp_path):
    """Whichever process it falls to, and whatever is wrong with it."""
    for found, sound, nothing in run_on_ranks(_torn, 3, tmp_path):
        assert len(found) >= 2 * 3
        for name, (kind, text) in found:
            assert kind == "TornCheckpointError", name
            assert name in text
        assert sound is None
        assert nothing[0] == "TornCheckpointError"


def _twice(world, folder):
    first = Path(_try(save_pieces, world, folder))
    inode = (first / "manifest.json").stat().st_ino
    again = Path(_try(save_pieces, world, folder))
    same = (again / "manifest.json").stat().st_ino == inode
    peers_of(world).gather("looked")
    if world.rank == 0:
        (first / "model-00001-of-00002.safetensors").write_bytes(b"torn")
    peers_of(world).gather("torn")
    _try(save_pieces, world, folder)
    return same


def test_a_step_that_is_there_is_left_and_a_torn_one_replaced(tmp_path):
    assert run_on_ranks(_twice, 2, tmp_path) == [True, True]
    assert_same(load(tmp_path / "step-00000005"), whole_snapshot())


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
        path, passed_over = newest(folder)
        assert passed_over == []
        assert_same(load(path), whole_snapshot())
        # At its last word all is written: rank 0 may have committed by then.
        assert path.name == "step-00000005" or moment == max(moments)
        prune(folder, 2, None)
        assert all(files.step_of(entry) for entry in folder.iterdir())
