"""Readers return plain data or one error; files are written completely, and readable by the right users."""

import json
import lzma
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.checkpoint.files import checked_plain
from manyhands.checkpoint.snapshot import unflatten
from manyhands.cluster.hosts.formats import rank_table
from manyhands.config.job import Job
from manyhands.config.load import load_job
from manyhands.core import records
from manyhands.core.errors import UserError
from manyhands.core.files import (
    UnreadableError,
    decoded,
    one_at_a_time,
    open_file,
    parse_json,
    parse_toml,
    parse_yaml,
    private_files,
    read_bytes,
    read_object,
    replacing,
    typed_number,
    usual_umask,
)
from manyhands.core.mesh import layout_from_plain, make_mesh, parse_mesh
from manyhands.core.quantities import parse_bandwidth, parse_memory
from manyhands.core.records import read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import ProcessInfo
from manyhands.data.datasets.published import read_idx
from manyhands.run import train
from manyhands.run.logs import read_places
from manyhands.worker import entry

DEEP = 5_000
JSON_TEXTS = ("{}", "[1, -2.5e3, true, null]", '{"a": [{"b": "[[[[{{{{ \\" \\\\"}]}', '"\\ud83d\\ude00 and \\\\ud800"')
JSON_TEXTS += (f'"{"[" * DEEP}"',)


@pytest.mark.parametrize("text", JSON_TEXTS)
def test_json_is_what_pythons_reader_makes_of_it(text):
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


def test_halves_of_characters_can_be_shown_afterwards():
    shown = ["?", "?x", "a\\ud800", "😀"]
    assert parse_json('["\\ud800", "\\udfffx", "a\\\\ud800", "\\ud83d\\ude00"]') == shown


def test_names_that_are_there_twice_are_refused_where_that_is_asked_for():
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(UnreadableError, match='"a" is given twice'):
        parse_json('{"a": 1, "b": 1, "a": 2}', once_each=True)


ALIASES = "a0: &a0 {k: v}\n" + "".join(f"a{n + 1}: &a{n + 1}\n  <<: [*a{n}, *a{n}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_json, "[" * DEEP, "too deep"),
        (parse_json, '{"a":' * DEEP, "too deep"),
        (parse_json, "9" * 5_000, "40 digits"),
        (parse_json, "1e999", "exceeds the range"),
        (parse_json, "NaN", "NaN"),
        (parse_json, "[1,", "line 1"),
        (parse_json, "\ufeff\ufeff1", "BOM"),
        (parse_toml, "a = " + "[" * DEEP, "too deep"),
        (parse_toml, "a = " + "9" * 5_000, "digits"),
        (parse_toml, "a = 1\nb\n", "line 2"),
        (parse_toml, "a = 1\n" * 300_000, "1 MiB"),
        (parse_yaml, "[" * DEEP, "too deep"),
        (parse_yaml, "a: " + "{a: " * DEEP, "too deep"),
        (parse_yaml, "a: " + "9" * 5_000, "digits"),
        (parse_yaml, "a: !!python/object:os.system x", "line 1"),
        (parse_yaml, "a: 2001-99-99", "can't be read"),
        (parse_yaml, "a: 0x_", "can't be read"),
        (parse_yaml, "a: [1", "line 1"),
        (parse_yaml, "{[1]: 2}", "line 1"),
        (parse_yaml, "x" * 200_000, "128 KiB"),
        (parse_yaml, ALIASES, "line 3: .*alias"),
    ],
)
def test_text_that_is_too_much_or_none_of_its_kind_says_so(parse, text, said):
    with pytest.raises(UnreadableError, match=said):
        parse(text)


def test_text_may_begin_with_a_mark_and_says_which_line_is_of_another_encoding():
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert decoded("名字 = 1".encode(encoding)) == "名字 = 1"
    with pytest.raises(UnreadableError, match="line 2 is not UTF-8, but may be GBK"):
        decoded("a = 1\nb = '猫和狗'".encode("gbk"))


def test_files_have_a_largest_size(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert read_object(file) == {"a": 1}
    with pytest.raises(UnreadableError, match="exceeds the limit"):
        read_bytes(file, 4)
    assert read_object(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", '{"step": "many"}'),
        ("state.json", '{"step": 1e3}'),
        ("state.json", '{"best": 3}'),
        ("state.json", '{"classes": "cat"}'),
        ("state.json", '{"session": {"losses": [["x", 1]]}}'),
        ("state.json", '{"session": {"losses": [[1.0]]}}'),
        ("state.json", '{"session": {"scheduler": 3}}'),
        ("optimizer.json", '{"state": [1]}'),
        ("optimizer.json", '{"state": {"a": 1}}'),
        ("optimizer.json", '{"param_groups": [{"params": 3}]}'),
        ("manifest.json", '{"files": []}'),
        ("manifest.json", '{"files": {"state.json": {"size": "1", "sha256": 3}}}'),
        ("manifest.json", "[]"),
    ],
)
def test_files_of_a_checkpoint_hold_what_such_files_hold(name, text):
    with pytest.raises(ValueError, match=name):
        checked_plain(name, text.encode())


@pytest.mark.parametrize("tree", [{"$tensor": "b"}, {"$tensor": ["a"]}, {"$tensor": None}])
def test_an_optimizer_names_tensors_that_are_there(tree):
    with pytest.raises(UnreadableError, match="the tensor is missing"):
        unflatten({"x": [tree]}, {})


@pytest.mark.parametrize("length", ["Infinity", "1e30", "-1", '"3"', "true", "9" * 30])
def test_a_layout_has_lengths(length):
    content = json.loads(f'{{"shape": [{length}], "view": [{length}], "cuts": []}}')
    with pytest.raises(UserError, match="layout"):
        layout_from_plain(content, parse_mesh("dp=2"), "plan")


@pytest.mark.parametrize("sizes", [{"dp": 10**9}, {"dp": 2**16, "tp": 2}, {"": 2}, {"dp": "2"}, {"d p": 2}])
def test_a_mesh_has_a_number_of_processes_that_there_can_be(sizes):
    with pytest.raises(UserError):
        make_mesh(sizes)
    with pytest.raises(UserError):
        parse_mesh("dp=" + "9" * 5_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"server_list": [], "status": "completed", "\\ud800": 1}',
        '{"status": "\\ud800", "server_list": [{"server_id": "\\udc00", "device": []}]}',
        '{"status": "completed", "server_list": [{"server_id": "\\udc00",'
        ' "device": [{"device_id": "0", "rank_id": "0"}]}]}',
    ],
)
def test_half_a_character_in_a_rank_table_is_refused_in_words_that_can_be_shown(text):
    with pytest.raises(UserError, match=r"server_list|status") as caught:
        rank_table.read(text, "table.json")
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"data": [5]}, "data.name"),
        ({"run.out": "a\0b"}, "run.out contains a NUL character"),
        ({"run.out": "a\udcff"}, "run.out is not valid UTF-8"),
        ({"train.lr": "9" * 5_000}, "train.lr"),
        ({"x" * 100_000: 1}, "there is no option"),
    ],
)
def test_strange_values_of_options_are_refused_on_one_screen(flags, said):
    with pytest.raises(UserError, match=said) as refused:
        load_job(flags, environment={})
    assert len(str(refused.value)) < 2_000


def test_a_word_that_looks_like_a_number_is_a_word():
    job = load_job({"data": 5, "model": 4294967296}, environment={}).job
    assert (job.data.name, job.model.name) == ("5", "4294967296")


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(UnreadableError, match=r"pipe|device"):
            read_bytes(path)
        with pytest.raises(UnreadableError, match=r"pipe|device"):
            open_file(path)
    with pytest.raises(UserError, match="device"):
        load_job({}, file=path, environment={})
    with pytest.raises(UserError, match="pipe"):
        read_idx(pipe, 3)


def test_what_a_shell_writes_into_a_pipe_is_read(tmp_path):
    """As in `manyhands train <(COMMAND)`: the writer comes late and takes its time."""
    os.mkfifo(tmp_path / "pipe")
    command = "sleep 0.3; printf 'data = \"digits\"\\n'; sleep 0.3; printf 'model = \"cnn\"\\n'"
    with subprocess.Popen(["sh", "-c", f"({command}) > {tmp_path / 'pipe'}"]):
        job = load_job({}, file=tmp_path / "pipe", environment={}).job
    assert (job.data.name, job.model.name) == ("digits", "cnn")


def test_an_error_stays_a_screen_whatever_was_wrong():
    error = UserError("x" * 100_000, "y" * 100_000, ("z" * 100_000,) * 100)
    assert len(str(error).splitlines()) < 40
    assert len(str(error)) < 60_000


@pytest.mark.parametrize("text", ["9" * 5_000, "-1", "", "٣", "1e3", " 1"])
def test_what_is_no_number_that_somebody_types_is_none(text):
    assert typed_number(text) is None
    assert typed_number("0123") == 123


@pytest.mark.parametrize("key", ["data.name", "run.out", "checkpoint.resume"])
def test_names_that_no_file_can_have_are_refused_before_they_are_looked_for(key):
    for name in ("x" * 300, "a/" * 3_000):
        with pytest.raises(UserError, match="too long for a file name"):
            load_job({key: name}, environment={})


@pytest.mark.parametrize("text", ["10" + " " * 100_000 + "!", "9" * 5_000, "9" * 5_000 + "GiB", "1e999", "٣GiB"])
def test_an_amount_that_nobody_means_is_refused_at_once(text):
    began = time.process_time()
    for parse_amount in (parse_memory, parse_bandwidth):
        with pytest.raises(UserError, match="is not a"):
            parse_amount(text)
    assert time.process_time() - began < 10  # it took minutes, with the square of the blanks


def test_something_else_in_the_place_of_a_runs_files_is_said(tmp_path, monkeypatch):
    places = tmp_path / "machines.json"
    endless = [{"host": "localhost", "ranks": [0, 10**9], "folder": "run", "local": False}]
    places.mkdir()
    with pytest.raises(UserError, match=r"machines\.json is damaged"):
        read_places(RunFolder(tmp_path))
    places.rmdir()
    places.write_text(json.dumps(endless))
    with pytest.raises(UserError, match=r"machines\.json is damaged"):
        read_places(RunFolder(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"b": "' + "x" * 3_000 + '"}\n{"c": 1}\n')
    monkeypatch.setattr(records, "MOST_BYTES", 1_000)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"a": 1}]


def test_an_archive_that_asks_for_gigabytes_to_begin_with_is_refused(tmp_path):
    """The old form of LZMA says in its head how much memory its reader takes."""
    packed = bytearray(lzma.compress(bytes(20_000), format=lzma.FORMAT_ALONE))
    packed[1:5] = b"\xff\xff\xff\xff"
    (tmp_path / "x.tar.xz").write_bytes(packed)
    code = (
        "import pathlib, resource, psutil, manyhands.data.datasets.published as archive\n"
        "resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**29,) * 2)\n"
        f"archive.unpack_once(pathlib.Path({str(tmp_path / 'x.tar.xz')!r}))"
    )
    variables = {**os.environ, "MANYHANDS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert "UserError: x.tar.xz can't be unpacked" in done.stderr


def test_two_that_write_one_file_at_a_time_do_not_write_into_each_other(tmp_path):
    file = tmp_path / "file"
    with replacing(file) as one:
        one.write_text("first")
        with replacing(file) as other:
            other.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def usual():
    previous = os.umask(0o022)
    yield
    os.umask(previous)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_shared_keeps_the_users_own_permissions(usual, tmp_path):
    with private_files():
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").touch()
        assert usual_umask() == 0o022
        cached = tmp_path / "cache" / "file"
        with one_at_a_time(cached), replacing(cached) as part:
            part.touch()
    (tmp_path / "after").touch()
    assert [mode(tmp_path / "run"), mode(tmp_path / "run" / "file")] == [0o700, 0o600]
    assert [mode(cached.parent), mode(cached), mode(tmp_path / "after")] == [0o755, 0o644, 0o644]
    assert usual_umask() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_that_takes_part_by_hand_writes_for_its_user_alone(usual, rank, tmp_path, monkeypatch):
    """Rank 1 may make the run folder on a machine of its own."""
    monkeypatch.chdir(tmp_path)

    def train_here(*_arguments):
        (tmp_path / "theirs").mkdir()
        return {"status": "finished", "step": 0, "folder": str(tmp_path / "theirs")}

    monkeypatch.setattr(entry, "train_here", train_here)
    train.train_in_process(Job(), ProcessInfo(rank=rank, size=2, started_by="--init"), quiet=True, objects=None)
    assert mode(tmp_path / "theirs") == 0o700
    assert usual_umask() == -1
