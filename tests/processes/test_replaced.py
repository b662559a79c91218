"""A picture that goes bad during a run: replaced alike at any number of processes, counted, and refused if many do."""

import functools
from pathlib import Path

import pytest

from manyhands.core.errors import ManyhandsError
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError
from manyhands.train.loop import fit
from tests.processes.ranks import run_on_ranks
from tests.processes.test_same_data import make_folder
from tests.processes.updates import EXACT, built, lines, normed


def pictures(root):
    for split in ("train", "val"):
        make_folder(root / split, 16)


def _spoil(root, how, count):
    for path in sorted((root / "train").rglob("*.bmp"))[3 : 3 + count]:
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:60] if how == "truncated" else b"")


def trained(world, place, how="truncated", count=1, skips=True, workers=0, where="train"):
    """Weights, the names of replaced pictures, and what ended the run; pictures go bad once all is built."""
    flags = {
        "data.name": str(place), "train.batch": 12, "train.epochs": 2, **EXACT,
        "data.image_size": 8, "data.channels": 1, "model.num_classes": 5, "data.skip_corrupt": skips,
        "data.workers": workers, "train.norm_group": 6, "data.memory_limit_mib": 0,
    }  # fmt: skip
    with built(world, normed(), flags) as trainer:
        if world.is_main and where == "train":
            _spoil(place, how, count)
        elif world.is_main:
            (place / "val" / "cat" / "01.bmp").write_bytes(b"")
        trainer.verify_replicas()  # the others wait until that is done
        said = ""
        try:
            fit(trainer)
        except ManyhandsError as error:
            said = f"{error.message} | {error.where}"
        weights = {name: one.clone() for name, one in trainer.network.full_state_dict().items()}
        events = [event for event in lines(trainer.folder.events) if event["kind"] == "replaced"]
    return weights, [[Path(one).name for one in event["data"]["pictures"]] for event in events], said


@pytest.mark.parametrize("how", ["truncated", "gone"])
def test_another_takes_its_place_alike_at_any_number_of_processes(how, tmp_path):
    pictures(tmp_path / "one")
    truth, named, said = trained(World(), tmp_path / "one", how)
    assert not said
    assert named == [["03.bmp"]] * 2  # in each epoch
    for size, workers in ((2, 1), (3, 0)) if how == "truncated" else ((2, 0),):
        pictures(tmp_path / str(size))
        results = run_on_ranks(trained, size, tmp_path / str(size), how, 1, True, workers)
        assert results[0][1] == named
        for weights, _, ended in results:
            assert not ended
            apart = {name: float((one - truth[name]).abs().max()) for name, one in weights.items()}
            assert max(apart.values()) < 1e-9, (size, apart)


@pytest.mark.parametrize(
    ("size", "how", "begins", "ends"),
    [
        (1, {"skips": False}, "the picture 03.bmp can't be read", "train/cat/03.bmp"),
        (1, {"where": "val"}, "the picture 01.bmp can't be read", ""),  # in an evaluation always
        (2, {"how": "empty", "count": 11}, "11 pictures can't be read, such as ", " | data.skip_corrupt"),
    ],
)
def test_what_is_not_replaced_ends_the_run_by_name(size, how, begins, ends, tmp_path):
    pictures(tmp_path)
    for _, named, said in run_on_ranks(functools.partial(trained, **how), size, tmp_path):
        assert not named or "count" in how
        assert said.startswith(begins)
        assert said.endswith(ends)


def test_more_than_ten_are_refused_at_the_start(tmp_path):
    pictures(tmp_path)
    _spoil(tmp_path, "empty", 11)
    with pytest.raises(ManyhandsError, match="11 pictures can't be read") as refused:
        trained(World(), tmp_path)
    assert not isinstance(refused.value, CorruptImageError)
    assert refused.value.exit_code == 2
