"""A drill makes machines of its own where it is root, and leaves none."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import marked, run
from tests.network.test_launch import here

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
__all__ = ["here"]


def test_a_machine_dies_and_another_has_a_new_key(here):
    ended = run("drill", "--faults", "kill-machine,changed-key", "--json")
    assert ended.code == 0, ended.err + ended.out
    told = json.loads(ended.out)["faults"]
    assert [(one["row"], one["verdict"]) for one in told] == [(3, "holds"), (27, "holds")]
    assert told[0]["updates_lost"] <= 1
    assert not marked("DRILL_FOLDER")
    assert not list(here.iterdir())
    made = [path for path in Path("/run/netns").glob("mhdrill-*") if path.exists()]
    assert not made
