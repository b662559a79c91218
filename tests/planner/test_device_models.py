"""Devices that aren't here: each of ours is whole and has a source, a user's file adds to them, mistakes are told."""

import tomllib
from importlib import resources

import platformdirs
import pytest

from manyhands.core.errors import UserError
from manyhands.planner.device_models import REACHED_OPERATIONS, device_model
from manyhands.planner.find import SearchRequest, find
from manyhands.planner.timing import OpTimes
from tests.planner.nets import chain, graph_of

OURS = tomllib.loads(resources.files("manyhands.planner").joinpath("device_models.toml").read_text(encoding="utf-8"))
CHAIN = graph_of(chain(), channels=4)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path)
    return tmp_path / "device-models.toml"


@pytest.mark.parametrize("name", sorted(OURS))
def test_each_of_ours_is_whole_and_has_a_source(own, name):
    found = device_model(name.upper())
    assert found.source
    assert found.memory_bytes >= 16e9
    for precision, rate in found.operations.items():
        assert found.rates(precision)[0] == pytest.approx(REACHED_OPERATIONS * rate)
        assert found.source in found.said(precision)
        assert "estimated" in found.said(precision)
    assert {"h100", "a100", "910b", "rtx4090"} <= set(OURS)


def test_users_add_their_own(own):
    own.write_text(
        '[mine]\nname = "My own"\nmemory = "8GB"\nbandwidth = 1e11\nwithin = 1e10\n'
        'operations = { fp32 = 1e13 }\nsource = "measured"\n',
        encoding="utf-8",
    )
    assert device_model("mine").name == "My own"
    assert device_model("h100").name == "NVIDIA H100 SXM"
    with pytest.raises(UserError, match="only for fp32, not bf16"):
        device_model("mine").rates("bf16")


@pytest.mark.parametrize("content", ["[mine", "[mine]\nname = 3", "[mine]\nmemory = '8GB'", "mine = 3"])
def test_a_wrong_file_and_an_unknown_name_are_told(own, content):
    own.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"device-models\.toml|mine") as error:
        device_model("mine")
    assert str(own) in f"{error.value.where} {error.value.message}"
    own.unlink()
    with pytest.raises(UserError, match="h1000") as error:
        device_model("h1000")
    assert "h100" in " ".join(error.value.hints)


def test_a_faster_device_makes_shorter_steps_and_nothing_is_measured(own, tmp_path):
    slow, fast = (
        find(
            CHAIN,
            SearchRequest(2, 64, accelerator=True),
            OpTimes(folder=tmp_path, rates=device_model(name).rates("fp32")),
        )
        for name in ("t4", "h100")
    )
    assert fast.options[0].prediction.compute_seconds < slow.options[0].prediction.compute_seconds
    assert not list(tmp_path.glob("ops-*"))
