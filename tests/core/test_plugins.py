"""Objects of the user's own files."""

import random
import subprocess
import sys

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
    code = f"import sys; sys.path[:] = {sys.path!r}; import random; print(random.Random)"
    assert "random.Random" in subprocess.check_output([sys.executable, "-c", code], text=True)


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net_of_mine.py").write_text(f"name = '{folder}'\n")
    found = [load_object(f"{tmp_path}/{folder}/net_of_mine.py:name", "model.name") for folder in ("a", "b")]
    assert found == ["a", "b"]


def test_a_broken_file_leaves_nothing_behind(tmp_path):
    (tmp_path / "types.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_object(f"{tmp_path}/types.py:x", "model.name")
    import types

    assert types.__file__ != str(tmp_path / "types.py")
    assert not [name for name in sys.modules if str(tmp_path) in name]


def test_a_missing_object_gets_a_suggestion(tmp_path):
    (tmp_path / "mine.py").write_text("class Network: ...\n")
    with pytest.raises(UserError, match="has no object Netwrok") as caught:
        load_object(f"{tmp_path}/mine.py:Netwrok", "model.name")
    assert caught.value.hints == ('did you mean "Network"?',)


def test_the_names_of_data_sets_are_read_without_an_import():
    for word in module_names(CHOICES):
        assert read_choice(CHOICES, word)["NAMES"] == load_choice(CHOICES, word).NAMES
    assert read_choice(CHOICES, "published")["NAMES"] == tuple(KNOWN)


def test_what_a_choice_file_computes_is_not_read():
    found = read_choice("manyhands.models.architectures", "torchvision")
    assert (found["PREFIX"], found["NAMES"]) == ("torchvision:", None)
    assert "build_pretrained" in found
    assert read_choice("manyhands.models.architectures", "mlp")["NAMES"] == ("mlp",)
