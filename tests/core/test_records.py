"""Lines of records: each whole, and by itself, whatever happened to the one before it."""

import json

import pytest

from manyhands.cluster.agents.mirror import RecordReceiver
from manyhands.cluster.agents.protocol import FilePiece
from manyhands.core.errors import UserError
from manyhands.core.files import is_disk_full
from manyhands.core.plan_record import PlanRecord, parse_plan_record, read_plan_record, write_plan_record
from manyhands.core.records import Event, append, read_lines, write_json
from manyhands.core.run_folder import RunFolder
from manyhands.train.journal import Journal


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
