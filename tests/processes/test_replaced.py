"""A picture that goes bad during a run: replaced alike at any number of processes, counted, and refused if many do."""

from pathlib import Path

import numpy
import pytest
from PIL import Image

from manyhands.core.errors import ManyhandsError
from manyhands.core.world import World
from manyhands.data.decode import CorruptImageError
from manyhands.train.loop import fit
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, built, lines, normed

EACH = 24


def pictures(root):
    numbers = numpy.random.default_rng(7)
    for split, count in (("train", EACH), ("val", 4)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                values = numbers.integers(0, 255, (20, 16, 3), dtype=numpy.uint8)
                Image.fromarray(values).save(root / split / name / f"{number:02}.png")


def _spoil(root, how, count):
    for path in sorted((root / "train").rglob("*.png"))[3 : 3 + count]:
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
            (place / "val" / "cat" / "01.png").write_bytes(b"")
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
    assert named == [["03.png"]] * 2  # in each epoch
    for size, workers in ((2, 1), (3, 0)) if how == "truncated" else ((2, 0),):
        pictures(tmp_path / str(size))
        results = run_on_ranks(trained, size, tmp_path / str(size), how, 1, True, workers)
        assert results[0][1] == named
        for weights, _, ended in results:
            assert not ended
            apart = {name: float((one - truth[name]).abs().max()) for name, one in weights.items()}
            assert max(apart.values()) < 1e-9, (size, apart)


def test_without_the_option_it_ends_the_run_by_name(tmp_path):
    pictures(tmp_path)
    _, named, said = trained(World(), tmp_path, skips=False)
    assert not named
    assert "the picture 03.png can't be read" in said
    assert said.endswith("train/cat/03.png")


def test_more_than_ten_are_refused_by_all(tmp_path):
    pictures(tmp_path)
    for _, _, said in run_on_ranks(trained, 2, tmp_path, "empty", 11):
        assert said.startswith("11 pictures can't be read, such as ")
        assert said.endswith(" | data.skip_corrupt")


def test_in_an_evaluation_it_always_ends_the_run(tmp_path):
    pictures(tmp_path)
    _, _, said = trained(World(), tmp_path, where="val")
    assert "the picture 01.png can't be read" in said


def test_more_than_ten_are_refused_at_the_start(tmp_path):
    pictures(tmp_path)
    _spoil(tmp_path, "empty", 11)
    with pytest.raises(ManyhandsError, match="11 pictures can't be read") as refused:
        trained(World(), tmp_path)
    assert not isinstance(refused.value, CorruptImageError)
    assert refused.value.exit_code == 2
