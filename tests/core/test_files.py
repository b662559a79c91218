"""Readers return plain data or one error; files are written completely; lines of records are whole, each by itself."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from manyhands.cluster.agents.mirror import RecordReceiver
from manyhands.cluster.agents.protocol import FilePiece
from manyhands.config.job import Job
from manyhands.config.load import load_job
from manyhands.core import files, records
from manyhands.core.errors import UserError
from manyhands.core.files import is_disk_full
from manyhands.core.plan_record import PlanRecord, parse_plan_record, read_plan_record, write_plan_record
from manyhands.core.records import Event, append, read_lines, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import ProcessInfo
from manyhands.data.datasets.published import read_idx
from manyhands.run import train
from manyhands.run.logs import read_log_locations
from manyhands.train.journal import Journal
from manyhands.worker import entry

DEEP = 5_000
JSON_TEXTS = ("{}", "[1, -2.5e3, true, null]", '{"a": [{"b": "[[[[{{{{ \\" \\\\"}]}', '"\\ud83d\\ude00 and \\\\ud800"')
JSON_TEXTS += (f'"{"[" * DEEP}"',)


def test_json_is_what_pythons_reader_makes_of_it_but_halves_of_characters_can_be_shown():
    for text in JSON_TEXTS:
        assert files.parse_json(text) == files.parse_json(text.encode()) == json.loads(text)
    assert files.parse_json('["\\ud800", "\\udfffx", "a\\\\ud800"]') == ["?", "?x", "a\\ud800"]
    with pytest.raises(files.UnreadableError, match='"a" is given twice'):
        files.parse_json('{"a": 1, "b": 1, "a": 2}', once_each=True)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert files.decode_text("名字 = 1".encode(encoding)) == "名字 = 1"


ALIASES = "a0: &a0 {k: v}\n" + "".join(f"a{n + 1}: &a{n + 1}\n  <<: [*a{n}, *a{n}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (files.parse_json, "[" * DEEP, "too deep"),
        (files.parse_json, "9" * 5_000, "40 digits"),
        (files.parse_json, "1e999", "exceeds the range"),
        (files.parse_json, "[1,", "line 1"),
        (files.parse_toml, "a = " + "[" * DEEP, "too deep"),
        (files.parse_toml, "a = 1\nb\n", "line 2"),
        (files.parse_toml, "a = 1\n" * 300_000, "1 MiB"),
        (files.parse_yaml, "[" * DEEP, "too deep"),
        (files.parse_yaml, "a: " + "9" * 5_000, "digits"),
        (files.parse_yaml, "a: !!python/object:os.system x", "line 1"),
        (files.parse_yaml, "a: 2001-99-99", "can't be read"),
        (files.parse_yaml, "{[1]: 2}", "line 1"),
        (files.parse_yaml, "x" * 200_000, "128 KiB"),
        (files.parse_yaml, ALIASES, "line 3: .*alias"),
        (files.decode_text, "a = 1\nb = '猫和狗'".encode("gbk"), "line 2 is not UTF-8, but may be GBK"),
    ],
)
def test_text_that_is_too_much_or_none_of_its_kind_says_so(parse, text, said):
    with pytest.raises(files.UnreadableError, match=said):
        parse(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"data": [5]}, "data.name"),
        ({"run.out": "a\0b"}, "run.out contains a NUL character"),
        ({"run.out": "a\udcff"}, "run.out is not valid UTF-8"),
        ({"train.lr": "9" * 5_000}, "train.lr"),
        ({"x" * 100_000: 1}, "there is no option"),
        ({"checkpoint.resume": "a/" * 3_000}, "too long for a file name"),
    ],
)
def test_strange_values_of_options_are_refused_on_one_screen(flags, said):
    with pytest.raises(UserError, match=said) as refused:
        load_job(flags, environment={})
    assert len(str(refused.value)) < 2_000


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(files.UnreadableError, match=r"pipe|device"):
            files.read_bytes(path)
        with pytest.raises(files.UnreadableError, match=r"pipe|device"):
            files.open_file(path)
    with pytest.raises(UserError, match="device"):
        load_job({}, file=path, environment={})
    with pytest.raises(UserError, match="pipe"):
        read_idx(pipe, 3)


def test_what_a_shell_writes_into_a_pipe_is_read(tmp_path):
    """As in `manyhands train <(COMMAND)`: the writer comes late and takes its time."""
    os.mkfifo(tmp_path / "pipe")
    command = "sleep 0.2; printf 'data = \"digits\"\\n'; sleep 0.2; printf 'model = \"cnn\"\\n'"
    with subprocess.Popen(["sh", "-c", f"({command}) > {tmp_path / 'pipe'}"]):
        job = load_job({}, file=tmp_path / "pipe", environment={}).job
    assert (job.data.name, job.model.name) == ("digits", "cnn")


def test_something_else_in_the_place_of_a_runs_files_is_said(tmp_path, monkeypatch):
    endless = [{"host": "localhost", "ranks": [0, 10**9], "folder": "run", "local": False}]
    (tmp_path / "machines.json").write_text(json.dumps(endless))
    with pytest.raises(UserError, match=r"machines\.json is damaged"):
        read_log_locations(RunFolder(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"b": "' + "x" * 3_000 + '"}\n{"c": 1}\n')
    monkeypatch.setattr(records, "MOST_BYTES", 1_000)
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [{"a": 1}]
    with pytest.raises(files.UnreadableError, match="exceeds the limit"):
        files.read_bytes(tmp_path / "metrics.jsonl", 4)
    assert files.read_object(tmp_path / "nothing") is None


def test_two_that_write_one_file_at_a_time_do_not_write_into_each_other(tmp_path):
    file = tmp_path / "file"
    with files.replaced_on_success(file) as one:
        one.write_text("first")
        with files.replaced_on_success(file) as other:
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
    with files.private_files():
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").touch()
        assert files.usual_umask() == 0o022
        cached = tmp_path / "cache" / "file"
        with files.locked(cached), files.replaced_on_success(cached) as part:
            part.touch()
    (tmp_path / "after").touch()
    assert [mode(tmp_path / "run"), mode(tmp_path / "run" / "file")] == [0o700, 0o600]
    assert [mode(cached.parent), mode(cached), mode(tmp_path / "after")] == [0o755, 0o644, 0o644]
    assert files.usual_umask() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_that_takes_part_by_hand_writes_for_its_user_alone(usual, rank, tmp_path, monkeypatch):
    """Rank 1 may make the run folder on a machine of its own."""
    monkeypatch.chdir(tmp_path)

    def train_here(*_arguments):
        (tmp_path / "theirs").mkdir()
        return {"status": "finished", "step": 0, "folder": str(tmp_path / "theirs")}

    monkeypatch.setattr(entry, "run_training", train_here)
    train.train_in_process(Job(), ProcessInfo(rank=rank, size=2, started_by="--init"), quiet=True, objects=None)
    assert mode(tmp_path / "theirs") == 0o700
    assert files.usual_umask() == -1


def event(number, length=0):
    return Event(time=number, kind="note", message="x" * length)


def times(path):
    return [line["time"] for line in read_lines(path)]


def test_a_torn_last_line_does_not_take_the_next_record_with_it(tmp_path):
    path = tmp_path / "events.jsonl"
    append(path, event(1))
    with path.open("a") as file:
        file.write(event(2).model_dump_json()[:20])
    append(path, event(3))
    append(path, event(4))
    assert times(path) == [1, 3, 4]


def test_line_is_written_completely_or_the_caller_gets_an_error(small_disk, fill):
    path = small_disk / "events.jsonl"
    append(path, event(1, 3000))
    filler = fill(small_disk)
    assert is_disk_full(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append(path, event(2, 3000))
    with pytest.raises(OSError, match="No space left"):
        write_json(small_disk / "best.json", {"x": 1})
    assert sorted(file.name for file in small_disk.iterdir()) == ["events.jsonl", "filler"]
    filler.unlink()
    append(path, event(3))
    assert times(path) == [1, 3]


def test_records_wait_for_room_in_their_order(small_disk, fill, capsys):
    folder = RunFolder(small_disk)
    journal = Journal(folder, 0)
    journal.event("note", "x" * 3000, 1)
    filler = fill(small_disk)
    for step in range(2, 5):
        journal.event("note", "x" * 3000, step)
    assert capsys.readouterr().err.count("No space left") == 1
    filler.unlink()
    journal.event("note", "", 5)
    assert [line["step"] for line in read_lines(folder.events)] == [1, 2, 3, 4, 5]


def test_what_comes_from_another_machine_waits_for_room_too(small_disk, fill):
    receiver, path = RecordReceiver(small_disk), small_disk / "events.jsonl"
    lines = [json.dumps({"time": number, "text": "x" * 3000}) + "\n" for number in range(4)]
    filler = fill(small_disk)
    for number, line in enumerate(lines[:3]):
        receiver.write_piece(FilePiece(path.name, line, number * len(line)))
    filler.unlink()
    receiver.write_piece(FilePiece(path.name, lines[3], 3 * len(lines[0])))
    assert times(path) == [0, 1, 2, 3]


# plan.json as a file: what was written is read again, also by readers of other versions; what is none is named.
RUN = {"mesh": {"dp": 2}, "mode": "data", "sync": {"method": "allreduce"}, "shares": [[3, 2]], "exceptions": ["one"],
       "resolved": {"data.image_size": 8}}  # fmt: skip


def test_only_what_was_given_is_written_and_comes_back_and_fields_of_others_are_kept(tmp_path):
    path = tmp_path / "plan.json"
    record = PlanRecord.model_validate(RUN)
    write_plan_record(path, record)
    assert json.loads(path.read_text()) == {"format": "plan/1", **RUN}
    assert read_plan_record(path).as_plain() == record.as_plain()
    other = {"format": "plan/1", "mesh": {"dp": 2}, "color": "red", "mode": "semi"}
    assert parse_plan_record(other, "plan.json").as_plain() == other
    assert parse_plan_record(other, "plan.json").about() == {"color": "red", "mode": "semi"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("mesh", [2]), ("ops", {"fc": 3}), ("batch", True), ("shares", [[0.5]]), ("format", "plan/2"), ("format", 1)],
)
def test_a_field_of_another_kind_is_named(field, value):
    with pytest.raises(UserError, match=f'"?{field}"?') as caught:
        parse_plan_record({"format": "plan/1", field: value}, "mine.json")
    assert caught.value.where == "mine.json"
