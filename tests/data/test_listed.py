"""Sets of millions of pictures: what a listing takes, and that a machine's processes share it."""

import os
import subprocess
import sys
import tracemalloc

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from manyhands.core.records import FAILURE_FILE
from manyhands.core.scratch import of_this_start
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions
from manyhands.data.packed import PictureNames

PATHS = st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda name: name[0] != "/"))
# What a process of a run does, as often as a line comes in.
CHILD = """
import sys
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions
for _ in sys.stdin:
    train = open_data(DataOptions(name=sys.argv[1], memory_limit_mib=0)).train
    print(len(train), train.labels.sum().item(), "listed" in open("/proc/self/maps").read(), flush=True)
"""


def linked(root, classes, count):
    """A folder of hard links to one picture."""
    root.mkdir()
    Image.new("RGB", (80, 70)).save(root / "one.jpg")
    for label in range(classes):
        (root / f"n{label:08}").mkdir()
        for number in range(count):
            os.link(root / "one.jpg", root / f"n{label:08}" / f"n{label:08}_{number}.jpg")
    return root


@given(PATHS, st.data())
def test_names_are_what_a_tuple_of_them_is(paths, data):
    paths = [os.fsdecode(path.encode(errors="replace")) for path in paths]
    names = PictureNames.of(paths)
    assert (len(names), list(names), list(reversed(names))) == (len(paths), paths, paths[::-1])
    chosen = data.draw(st.lists(st.integers(0, len(paths) - 1)) if paths else st.just([]))
    part, again = names.part(chosen), [paths[index] for index in chosen]
    assert list(part) == again
    assert list(part.part(slice(1, None, 2))) == again[1::2]
    assert part == PictureNames.of(again)
    assert (part == names) == (again == paths)
    assert b"".join(part.blocks()) == b"".join(os.fsencode(name) + b"\0" for name in again)
    assert list(PictureNames(part.names, "a/b")) == [os.path.join("a/b", name) for name in again]  # noqa: PTH118
    with pytest.raises(IndexError):
        names[len(paths)]


def test_names_that_are_no_text_are_kept():
    names = PictureNames.of(["a/\udce9.jpg", "a/猫\n.jpg"])
    assert list(names) == ["a/\udce9.jpg", "a/猫\n.jpg"]


def test_a_picture_takes_some_dozens_of_bytes(tmp_path):
    """Held: its name (30 bytes), where that ends, its label, which part it is of; while it is listed, twice that."""
    pictures = 30_000
    linked(tmp_path / "set", 10, pictures // 10)
    options = DataOptions(name=str(tmp_path / "set"))
    open_data(options)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    splits = open_data(options)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(splits.train) + len(splits.test) == pictures
    assert (after - before) / pictures < 80
    assert (peak - before) / pictures < 240


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_of_one_start_map_one_listing_though_the_folder_changes(tmp_path):
    root, shared = linked(tmp_path / "set", 2, 10), tmp_path / "start"
    children = []
    for rank in range(2):
        (shared / "ranks").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, FAILURE_FILE: str(shared / f"{rank}.json")}
        command = [sys.executable, "-c", CHILD, str(root)]
        children.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )

    def opened(child):
        child.stdin.write("\n")
        child.stdin.flush()
        return child.stdout.readline().split()

    first = opened(children[0])
    for number in range(40):
        os.link(root / "one.jpg", root / "n00000001" / f"more-{number}.jpg")
    assert first == opened(children[1]) == ["18", "9", "True"]
    assert opened(children[0]) == opened(children[1]) != first  # asked again, it is listed again
    for child in children:
        child.communicate()
        assert child.returncode == 0


def test_without_a_start_of_ours_there_is_nothing_to_share(monkeypatch):
    monkeypatch.delenv(FAILURE_FILE, raising=False)
    assert of_this_start() is None


def test_a_full_disk_leaves_each_process_its_own_listing(tmp_path, monkeypatch):
    root = linked(tmp_path / "set", 2, 10)
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "start" / "0.json"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    opened = open_data(DataOptions(name=str(root), memory_limit_mib=0))
    assert len(opened.train) == 18
    assert "no room" in opened.notes[-1]
