"""What explain says is what train would do, with where each value is from."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cli.main import main
from manyhands.cluster.rendezvous import participate
from manyhands.config.load import load_job
from manyhands.run.explain import explained

WORKER = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def told(environment=None, file=None, **flags):
    flags = {key.replace("__", "."): value for key, value in flags.items()}
    rows = explained(load_job(flags, file=file, environment={}), environment or {})
    return {row.key: row for row in rows}


@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))))
def test_it_says_the_place_that_train_takes(shape):
    size, rank = shape
    variables = {**WORKER, "RANK": str(rank), "WORLD_SIZE": str(size)}
    rows = told(variables)
    membership = participate(load_job({}, environment={}).job.cluster, variables).membership
    assert (rows["rank"].value, rows["world_size"].value) == (membership.rank, membership.size) == (rank, size)
    assert (rows["rank"].origin, rows["master_port"].value) == ("RANK", 29400)


def test_flags_files_and_defaults_are_told_apart(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[cluster]\nprocesses = 3\n")
    assert told(file=file)["processes"].origin == str(file)
    assert told(file=file, cluster__processes=2)["processes"].origin == "-n"
    assert told()["processes"].origin == "default"
    assert told(cluster__device="cpu")["device"].origin == "--device"


def test_a_place_has_its_own_device():
    rows = told({**WORKER, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, cluster__device="cuda")
    assert rows["device"].value == "cuda:1"
    assert "auto" not in str(rows["backend"].value)


def test_shares_are_told_where_they_are_not_simply_the_same():
    by_hand = told(cluster__processes=2, cluster__shares=[24, 8])["shares"]
    assert (by_hand.value, by_hand.text, by_hand.origin) == ([24, 8], "24, 8 samples of each update", "flag")
    assert "measured" in told(cluster__shares="auto")["shares"].text
    assert "shares" not in told()
    assert "shares" not in told(cluster__shares="equal")


def test_what_is_not_followed_is_told():
    assert "-n 4" in told(WORKER, cluster__processes=4)["not_followed"].value


@pytest.mark.parametrize("init", ["tcp://10.0.0.1:5", "file:///tmp/x"])
def test_the_command_prints_a_table_or_json(init, capsys):
    arguments = ["explain", "--init", init, "--world-size", "2", "--rank", "0"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    table = capsys.readouterr().out
    assert "world size" in table
    assert "--world-size" in table
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["rank"] == {"value": 0, "from": "--rank"}
