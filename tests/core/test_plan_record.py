"""plan.json as a file: what was written is read again, also by readers of other versions; what is none is named."""

import json

import pytest

from manyhands.core.errors import UserError
from manyhands.core.plan_record import PlanRecord, parse_plan_record, read_plan_record, write_plan_record

RUN = {
    "mesh": {"dp": 2},
    "mode": "data",
    "sync": {"method": "allreduce"},
    "shares": [[3, 2]],
    "exceptions": ["one"],
    "resolved": {"data.image_size": 8},
}


def test_only_what_was_given_is_written_and_comes_back(tmp_path):
    path = tmp_path / "plan.json"
    record = PlanRecord.model_validate(RUN)
    write_plan_record(path, record)
    assert json.loads(path.read_text()) == {"format": "plan/1", **RUN}
    assert read_plan_record(path).as_plain() == record.as_plain()


def test_fields_of_others_are_kept():
    other = {"format": "plan/1", "mesh": {"dp": 2}, "colour": "red", "mode": "semi"}
    assert parse_plan_record(other, "plan.json").as_plain() == other
    assert parse_plan_record(other, "plan.json").about() == {"colour": "red", "mode": "semi"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mesh", [2]),
        ("ops", {"fc": 3}),
        ("pinned", "fc"),
        ("layouts", []),
        ("reason", 3),
        ("candidates", ["data"]),
        ("batch", True),
        ("shares", [[0.5]]),
        ("exceptions", "none"),
        ("resolved", []),
    ],
)
def test_a_field_of_another_kind_is_named(field, value):
    with pytest.raises(UserError, match=f'"{field}"') as caught:
        parse_plan_record({"format": "plan/1", field: value}, "mine.json")
    assert caught.value.where == "mine.json"
    assert caught.value.hints


@pytest.mark.parametrize("content", [None, [], 7, {"format": "plan/2"}, {"format": 1}])
def test_another_kind_of_file_is_none(content):
    with pytest.raises(UserError, match="format"):
        parse_plan_record(content, "mine.json")
