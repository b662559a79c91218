"""What cut networks save together: bit-equal from any cut and number of processes to any other, or a clear refusal."""

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

SIZES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (1, 2, 2)]}
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


def cut_of(sizes, turn):
    """A cut over a mesh of some sizes; `turn` deals the axes to other dimensions."""
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


def cuts_for(size):
    return [cut_of(sizes, turn) for sizes in SIZES[size] for turn in (0, 1)]


def peers_of(world):
    return CheckpointGroup(world.rank, world.size, functools.partial(gather_plain, world=world))


def save_pieces(folder, step, snapshot, cut, peers):
    return CheckpointWriter(folder, peers, cut, pieces=True).write(step, snapshot)


def save_full(folder, step, snapshot, cut, peers):
    return CheckpointWriter(folder, peers, cut).write(step, snapshot)


def _save_all(world, folder):
    return [
        str(how(Path(folder) / f"{how.__name__}-{number}", 5, _mine(world, cut), cut, peers_of(world)))
        for number, cut in enumerate(cuts_for(world.size))
        for how in (save_pieces, save_full)
    ]


def _mine(world, cut):
    """A rank's pieces; the state is rank 0's to know."""
    mine = local(whole_snapshot(), cut, world.rank)
    return mine if world.rank == 0 else Snapshot(mine.model, mine.optimizer, {})


def _load_all(world, paths):
    for path in paths:
        source = open_checkpoint(Path(path))
        for cut in cuts_for(world.size):
            assert_same(source.snapshot(cut, world.rank), local(whole_snapshot(), cut, world.rank))
    return len(paths)


@pytest.mark.slow
def test_from_every_cut_and_number_to_every_other(tmp_path):
    paths = [path for size in SIZES for path in run_on_ranks(_save_all, size, str(tmp_path / str(size)))[0]]
    assert len(paths) == 28
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


def _try(how, world, folder, *, snapshot=None, limit_bytes=None, cut=None):
    """What a process got: a path, or the error's class, text and whether the disk was left clean."""
    cut = cut or cuts_for(world.size)[0]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard[1]))
    try:
        return str(how(folder, 5, snapshot or local(whole_snapshot(), cut, world.rank), cut, peers_of(world)))
    except (ManyhandsError, TypeError) as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, hard)


def _full_disk(world, folder, how, bad):
    limit = 100 if world.rank == bad else None
    failed = _try(how, world, Path(folder), limit_bytes=limit)
    return failed, _try(how, world, Path(folder))


@pytest.mark.parametrize(("how", "bad"), [(save_pieces, 1), (save_pieces, 0), (save_full, 0)])
def test_a_full_disk_on_one_process_costs_the_checkpoint_alone(tmp_path, how, bad):
    """The limit of a process's files is a disk that is full for it alone; what is saved next is sound."""
    for (kind, text), path in run_on_ranks(_full_disk, 3, str(tmp_path), how, bad):
        assert kind == SaveError.__name__
        assert "training can continue" in text
        assert_same(load(Path(path)), whole_snapshot())
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def _spoilt(world, folder, how, spoil):
    cut = cuts_for(world.size)[0]
    mine = local(whole_snapshot(), cut, world.rank)
    if world.rank == 1:
        spoil(mine)
    failed = _try(how, world, Path(folder), snapshot=mine)
    return failed, _try(how, world, Path(folder))


def _not_finite(snapshot):
    snapshot.model["conv.weight"].view(-1)[0] = float("nan")


def _another_type(snapshot):
    snapshot.model["fc.bias"] = snapshot.model["fc.bias"].double()


def _not_plain(snapshot):
    snapshot.state["object"] = object()


def _another_shape(snapshot):
    snapshot.model["conv.weight"] = torch.zeros(1)


@pytest.mark.parametrize("how", [save_pieces, save_full])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_not_finite, "conv.weight has 1 of"),
        (_another_type, "different networks"),
        (_not_plain, "not JSON serializable"),
        (_another_shape, "but the layout expects"),
    ],
)
def test_what_is_wrong_on_one_process_is_said_on_all_and_nothing_is_written(tmp_path, how, spoil, said):
    for (_, text), path in run_on_ranks(_spoilt, 2, str(tmp_path), how, spoil):
        assert said in text
        assert path.endswith("step-00000005")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def _elsewhere(world, folder):
    own = Path(folder) / str(world.rank)
    own.mkdir()
    pieces = _try(save_pieces, world, own)
    return pieces, _try(save_full, world, own)


def test_without_a_shared_disk_pieces_are_refused_and_whole_is_saved(tmp_path):
    for (kind, text), _ in run_on_ranks(_elsewhere, 3, str(tmp_path)):
        assert kind == "UserError"
        assert "rank 1 can't see rank 0's checkpoint folder" in text
        assert "save without checkpoint.pieces" in text
    assert_same(load(tmp_path / "0" / "step-00000005"), whole_snapshot())
    assert [len(list((tmp_path / str(rank)).iterdir())) for rank in range(3)] == [1, 0, 0]


def _on_two_disks(world, folder, writers, full):
    """Saves step 5 under every cut, on a disk of each process's own; where `full` is given, one's is full at first."""
    got = []
    for number, cut in enumerate(cuts_for(world.size)):
        own = Path(folder) / str(number) / str(world.rank)

        def how(folder, step, snapshot, cut, peers):
            return save_full(folder, step, snapshot, cut, replace(peers, writers=writers))

        limit = 100 if world.rank == full else None
        got.append((_try(how, world, own, cut=cut, limit_bytes=limit), _try(how, world, own, cut=cut)))
    return got


@pytest.mark.parametrize("writers", [{0: range(2), 2: range(2, 4)}, {0: range(1), 1: range(1, 4)}])
def test_machines_that_share_no_disk_both_have_all(tmp_path, writers):
    run_on_ranks(_on_two_disks, 4, str(tmp_path), writers, None)
    for number in range(len(cuts_for(4))):
        for rank in range(4):
            if rank in writers:
                assert_same(load(tmp_path / f"{number}/{rank}/step-00000005"), whole_snapshot())
            else:
                assert not (tmp_path / f"{number}/{rank}").exists()


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_of_two_machines(tmp_path, full):
    """The first one's costs the checkpoint, the second one's its copy alone; what is saved next is on both."""
    answers = run_on_ranks(_on_two_disks, 2, str(tmp_path), {0: range(1), 1: range(1, 2)}, full)
    for rank, got in enumerate(answers):
        for number, (first, second) in enumerate(got):
            assert isinstance(first, str) == (full == 1 and rank == 0)
            assert isinstance(first, str) or first[0] == SaveError.__name__
            assert_same(load(Path(second)), whole_snapshot())
            assert [entry.name for entry in (tmp_path / f"{number}/{rank}").iterdir()] == ["step-00000005"]


def _open(world, path):
    try:
        open_checkpoint(Path(path))
    except ManyhandsError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.slow
def test_a_torn_piece_is_named_on_every_process(tmp_path):
    """Whichever process it falls to, and whatever is wrong with it."""
    path = Path(run_on_ranks(_save_all, 3, str(tmp_path))[0][0])
    for file in path.iterdir():
        content = file.read_bytes()
        for spoil in (content[:-1] + bytes([content[-1] ^ 1]), None):
            file.unlink() if spoil is None else file.write_bytes(spoil)
            answers = run_on_ranks(_open, 3, str(path))
            assert [kind for kind, _ in answers] == ["TornCheckpointError"] * 3
            assert all(file.name in text for _, text in answers)
            file.write_bytes(content)
    assert run_on_ranks(_open, 3, str(path)) == [None] * 3
    assert [kind for kind, _ in run_on_ranks(_open, 2, str(tmp_path / "nowhere"))] == ["TornCheckpointError"] * 2


def _twice(world, folder):
    first = _try(save_pieces, world, Path(folder))
    inode = (Path(first) / "manifest.json").stat().st_ino
    again = _try(save_pieces, world, Path(folder))
    same = (Path(again) / "manifest.json").stat().st_ino == inode
    peers_of(world).gather("looked")
    if world.rank == 0:
        (Path(first) / "model-00001-of-00002.safetensors").write_bytes(b"torn")
    peers_of(world).gather("torn")
    _try(save_pieces, world, Path(folder))
    return same


def test_a_step_that_is_there_is_left_and_a_torn_one_replaced(tmp_path):
    assert run_on_ranks(_twice, 2, str(tmp_path)) == [True, True]
    assert_same(load(tmp_path / "step-00000005"), whole_snapshot())


def _dying(world, folder, how, moment):
    """Saves step 5; then rank 1 ends in the middle of saving step 6, at its so-many-th word with the others."""
    cut = cuts_for(world.size)[0]
    mine = local(whole_snapshot(), cut, world.rank)
    how(Path(folder), 5, mine, cut, peers_of(world))
    words = []

    def gather(value):
        words.append(value)
        if world.rank == 1 and len(words) == moment:
            os._exit(3)
        return gather_plain(value, world)

    how(Path(folder), 6, mine, cut, CheckpointGroup(world.rank, world.size, gather))


@pytest.mark.parametrize(("how", "moments"), [(save_pieces, range(1, 6)), (save_full, range(1, 4))])
def test_a_process_that_dies_leaves_the_older_checkpoint(tmp_path, how, moments):
    for moment in moments:
        folder = tmp_path / str(moment)
        with pytest.raises(AssertionError):
            run_on_ranks(_dying, 3, str(folder), how, moment)
        path, passed_over = newest(folder)
        assert passed_over == []
        assert_same(load(path), whole_snapshot())
        # At its last word all is written: rank 0 may have committed by then.
        assert path.name == "step-00000005" or moment == max(moments)
        prune(folder, 2, None)
        assert all(files.step_of(entry) for entry in folder.iterdir())


def _wrong_mesh(world, folder):
    return _try(save_pieces, world, Path(folder), cut=cut_of((4,), 0))


def test_a_mesh_of_another_size_is_refused(tmp_path):
    for kind, text in run_on_ranks(_wrong_mesh, 2, str(tmp_path)):
        assert kind == "RunError"
        assert "a=4" in text
