"""The record of a trained network is read as what others may have written."""

import json

import pytest
import torch

from manyhands.checkpoint.trained import Preprocessing, TrainedNetwork, find_record, parse_record
from manyhands.core.errors import UserError
from manyhands.data.samples import read_user_sample
from manyhands.data.splits import ImagesInMemory, UserSamples, by_names

PICTURES = Preprocessing(size=8, resize=9, channels=1, mean=(0.5,), std=(0.25,))
RECORD = TrainedNetwork(name="cnn", num_classes=2, pictures=PICTURES, classes=("cat", "dog"))


def test_what_is_written_is_read_again(tmp_path):
    plain = json.loads(RECORD.model_dump_json())
    assert parse_record(plain, "here") == RECORD
    assert find_record(tmp_path, {"trained": plain}) == RECORD
    assert find_record(tmp_path / "checkpoints" / "step-1", {}) is None
    (tmp_path / "job.toml").touch()
    (tmp_path / "network.json").write_text(json.dumps(plain))
    assert find_record(tmp_path / "checkpoints" / "step-1", {}) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"pictures": {}},
        {"pictures": {**PICTURES.model_dump(), "std": [0.0]}},
        {"pictures": {**PICTURES.model_dump(), "mean": [float("nan")]}},
        {"pictures": {**PICTURES.model_dump(), "channels": 3}},
        {"pictures": {**PICTURES.model_dump(), "size": 1 << 40}},
        {"classes": []},
        {"name": 3},
        {"num_classes": "many"},
    ],
)
def test_what_can_not_be_true_is_refused(change):
    with pytest.raises(UserError, match="can't be read"):
        parse_record({**RECORD.model_dump(), **change}, "here")
    for content in ([], "x", {}):
        with pytest.raises(UserError, match="can't be read"):
            parse_record(content, "here")
    with pytest.raises(UserError, match="newer version"):
        parse_record({**RECORD.model_dump(), "v": 99}, "here")


def source(labels):
    return ImagesInMemory(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), torch.tensor(labels))


def test_labels_follow_the_names_of_their_classes():
    assert by_names(source([0, 1]), ("3", "7"), tuple("0123456789"), "").labels.tolist() == [3, 7]
    assert by_names(source([0, 1]), ("cat", "dog"), ("0", "1", "2"), "").labels.tolist() == [0, 1]
    own = by_names(UserSamples([("x", 0), ("y", 1)]), ("dog", "owl"), ("cat", "dog", "owl"), "")
    again = by_names(own, ("cat", "dog", "owl"), ("owl", "dog", "cat"), "")
    assert [read_user_sample(again, sample) for sample in range(2)] == [("x", 1), ("y", 0)]
