"""Objects of the user's own files."""

import random
import sys
from pathlib import Path

import pytest

from manyhands.core.choices import load_choice, module_names, read_choice
from manyhands.core.errors import UserError
from manyhands.core.user_code import load_object
from manyhands.data.known import CHOICES, KNOWN


def test_a_users_file_never_stands_in_for_a_library_module(tmp_path):
    (tmp_path / "random.py").write_text("made = object()\n")
    made = load_object(f"{tmp_path}/random.py:made", "model.name")
    assert sys.modules["random"] is random
    assert load_object(f"{tmp_path}/random.py:made", "model.name") is made
    # Nor in a process that starts anew with the same path, as those that prepare pictures do.
    assert sys.path.index(str(tmp_path)) > sys.path.index(str(Path(random.__file__).parent))


def test_two_files_of_one_name_are_two_modules_and_a_broken_one_leaves_nothing_behind(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net_of_mine.py").write_text(f"name = '{folder}'\n")
    found = [load_object(f"{tmp_path}/{folder}/net_of_mine.py:name", "model.name") for folder in ("a", "b")]
    assert found == ["a", "b"]
    (tmp_path / "types.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_object(f"{tmp_path}/types.py:x", "model.name")
    assert not [name for name in sys.modules if f"{tmp_path}/types" in name]


def test_the_names_of_data_sets_are_read_without_an_import():
    for word in module_names(CHOICES):
        assert read_choice(CHOICES, word)["NAMES"] == load_choice(CHOICES, word).NAMES
    assert read_choice(CHOICES, "published")["NAMES"] == tuple(KNOWN)
    found = read_choice("manyhands.models.architectures", "torchvision")
    assert (found["PREFIX"], found["NAMES"]) == ("torchvision:", None)  # what a file computes is not read
    assert "build_pretrained" in found
