"""manyhands plan over a range of machines: its table adds up, agrees with a plan for one, and writes what is named."""

import json
import math
from xml.etree import ElementTree

import pytest

from manyhands.cli.main import main
from manyhands.planner.timing import Timing
from manyhands.worker.plan_growth import _beyond, numbers_of_machines
from tests.e2e.command import Ended, assert_one_screen

DATA = ("synthetic:64x3x16x16x10", "cnn", "--batch", "32")
ESTIMATED = ("--link", "1gbit", "--no-measure", "--json")


@pytest.fixture
def plan(capsys):
    def typed(*words):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *map(str, words)])
        said = capsys.readouterr()
        return Ended(ended.value.code, said.out, said.err)

    return typed


def rows_of(ended):
    assert ended.code == 0, ended.err
    return json.loads(ended.out)["rows"]


def test_numbers_of_machines_up_to_the_batch_and_what_they_cost(plan, here):
    ended = plan(*DATA, "-n", "1..1024", *ESTIMATED)
    rows = rows_of(ended)
    assert [row["processes"] for row in rows] == [1, 2, 3, 4, 8, 16, 32]
    assert "at most 32 machines can share an update" in ended.err
    assert "efficiency" in ended.err, "the table goes where JSON doesn't"
    assert not list(here.iterdir()), "nobody named a file"
    for row in rows:
        assert row["samples"] == math.ceil(32 / row["processes"])
        assert row["images_per_s"] == pytest.approx(32e3 / row["step_ms"], rel=1e-2)
        assert row["epoch_s"] * row["images_per_s"] == pytest.approx(64)
        assert row["process_hours"] * 3600 == pytest.approx(row["processes"] * row["epoch_s"])
        assert row["efficiency"] == pytest.approx(row["images_per_s"] / rows[0]["images_per_s"] / row["processes"])


def test_a_row_is_what_a_plan_for_so_many_says(plan, here):
    rows = rows_of(plan(*DATA, "-n", "1..4", *ESTIMATED))
    single = plan(*DATA, "-n", 4, *ESTIMATED)
    (data,) = (one for one in json.loads(single.out)["candidates"] if one["name"] == "data parallel")
    assert rows[-1]["step_ms"] == pytest.approx(data["step_ms"], rel=1e-3)
    assert rows[-1]["sync"] == "allreduce"


def test_on_a_slow_link_another_way_is_faster(plan, here):
    slow = (*DATA, "-n", "1..4", "--link", "1mbit", "--no-measure", "--json", "--set", "train.epochs=400")
    usual, chosen = rows_of(plan(*slow)), rows_of(plan(*slow, "--sync", "auto"))
    assert {row["sync"] for row in usual} == {"allreduce"}
    assert chosen[-1]["sync"] != "allreduce"
    assert chosen[-1]["step_ms"] < usual[-1]["step_ms"]


def test_the_picture_is_one_file_that_needs_no_other(plan, here):
    words = (*DATA, "-n", "1..16", *ESTIMATED, "--out", "deep/growth.svg")
    assert plan(*words).code == 0
    text = (here / "deep" / "growth.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "images per second" in text
    assert 'href="http' not in text
    again = plan(*words)
    assert_one_screen(again.err)
    assert "already exists" in again.err
    assert plan(*words, "--force").code == 0


def test_shares_are_timed_here(plan, here):
    found = plan(*DATA, "-n", "1..2", "--link", "10mbit", "--json")
    assert rows_of(found)[0]["compute_ms"] > 0
    assert json.loads(found.out)["measured"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-n", "4..1"), "is not a number of processes"),
        (("-n", "many"), "is not a number of processes"),
        (("-n", "1..8"), "need the link speed"),
        (("-n", "1..8", "--link", "1gbit", "--mesh", "dp=2"), "--mesh needs one number"),
        (("-n", "1..8", "--link", "1gbit", "--out", "plan.json"), "must be a .svg or .png file"),
        (("-n", "64..128", "--link", "1gbit"), "at most 32 machines"),
    ],
)
def test_what_can_not_be_is_said(plan, here, words, said):
    ended = plan(*DATA, "--no-measure", *words)
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert said in " ".join(ended.err.split())


def test_counts_end_where_the_range_ends():
    assert numbers_of_machines(1, 600) == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    assert numbers_of_machines(3, 5) == [3, 4, 5]
    assert numbers_of_machines(7, 7) == [7]


def test_shares_too_long_to_time_lie_on_the_line_of_the_last_two():
    assert _beyond([(4, Timing(2.0))], 8).seconds == 4
    assert _beyond([(2, Timing(9.0)), (4, Timing(2.0)), (8, Timing(3.0))], 16).seconds == 5
    assert _beyond([(4, Timing(3.0)), (8, Timing(2.0))], 16).seconds == 2, "noise makes no share shorter than a smaller"
