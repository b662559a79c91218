"""Rank tables: right ones are read whole, each wrong one is refused with the path of its field."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.hosts.formats import rank_table
from manyhands.cluster.hosts.formats.rank_table import read_hccn
from manyhands.cluster.hosts.inventory import Cluster, Machine
from manyhands.cluster.hosts.this_process import read_cluster
from manyhands.core.errors import UserError

PROPERTY = settings(max_examples=60, deadline=None)
TABLES = Path(__file__).with_name("rank_tables")


def _table(name):
    return (TABLES / f"{name}.json").read_text(encoding="utf-8")


RIGHT = {
    "right_8": [Machine("10.0.0.1", 8)],
    "right_16": [Machine("10.0.0.1", 8), Machine("10.0.0.2", 8)],
    "right_2_on_second_ring": [Machine("127.0.0.1", 2, (4, 5))],
    "right_ranks_backwards_no_version": [Machine("10.0.0.1", 8, (7, 6, 5, 4, 3, 2, 1, 0))],
    "right_newer_2_and_2": [Machine("10.0.0.1", 2), Machine("10.0.0.2", 2)],
    "right_in_pods": [Machine("172.17.0.4", 8)],
    "right_super_pod": [Machine("10.0.0.1", 3), Machine("10.0.0.2", 3)],
}
WRONG = {
    "wrong_rank_gap": ("server_list[1].device[3].rank_id", ['"16"', "0 … 15", "missing: 11"]),
    "wrong_rank_double": ("server_list[1].device[3].rank_id", ['"8" is given twice', "missing: 11"]),
    "wrong_server_count": ("server_count", ['"3"', "server_list has 2"]),
    "wrong_order": ("server_list[1].device[0].rank_id", ['"8"', "expected 0 … 7", "10.0.0.10"]),
    "wrong_placeholder": ("server_list[0].server_id", ['"10.*.*.*"', "placeholder", "hostname -I"]),
    "wrong_number_without_quotes": ("server_list[0].device[2].rank_id", ["is 2", "double quotes", 'write "2"']),
    "wrong_card_double": ("server_list[0].device[5].device_id", ['"4"', "device[4]"]),
    "wrong_address": ("server_list[0].device[1].device_ip", ['"192.168.1.300"', "expected an IP address"]),
    "wrong_address_double": ("server_list[1].device[0].device_ip", ['"192.168.1.1"', "server_list[0].device[0]"]),
    "wrong_version": ("version", ['"1.3"', '"1.0" or "1.2"']),
    "wrong_missing_field": ("server_list[1].device[2].rank_id", ["is missing"]),
    "wrong_not_json": ("", ["not valid JSON", "expecting ',' delimiter"]),
    "wrong_comment": ("", ["JSON allows no comments"]),
    "wrong_key_twice": ("", ['"server_id" is given twice in one object; the second value is "10.0.0.7"']),
    "wrong_name_too_long": ("server_list[1].server_id", ["at most 64 printable characters"]),
    "wrong_name_double": ("server_list[1].server_id", ['"10.0.0.1"', "server_list[0]"]),
    "wrong_initializing": ("status", ['"initializing"', "the rank table is incomplete"]),
    "wrong_spelling": ("server_list[1].device[1].devcie_ip", ['did you mean "device_ip"?']),
    "wrong_old_layout": ("group_list", ["before 1.0", "1.0 and 1.2 are supported"]),
    "wrong_pod_member": ("super_pod_list[0].server_list[1].server_id", ['"node_2"', "not in server_list"]),
}
PLACES = {"wrong_not_json": ", line 13", "wrong_comment": ", line 3", "wrong_key_twice": ""}


def _made(name="right_8", **changes):
    """A table with other fields, of which None removes one, in the order of their names."""
    table = {**json.loads(_table(name)), **changes}
    return json.dumps({key: table[key] for key in sorted(table) if table[key] is not None}, indent=1)


SERVER_LIST = json.loads(_table("right_8"))["server_list"]
MADE = [
    # with tabs and a mark of byte order
    ("\ufeff" + _table("wrong_rank_double").replace("    ", "\t").replace('"device_id":', '"device_id" : '),
     WRONG["wrong_rank_double"]),
    # the layout of ModelArts
    (_made(server_group_list=[{"group_id": "0", "server_count": "1", "server_list": SERVER_LIST}],
           server_list=None, server_count=None),
     ("server_group_list", ["each server_list inside server_group_list"])),
    # another version, behind a mistake that it explains
    (_made(version="2.1", server_list=[{**SERVER_LIST[0], "device": [{"rank_id": 0}]}]),
     ("version", ['write "1.0" or "1.2"'])),
    *((_table("right_8").replace("10.0.0.1", word, 1), ("server_list[0].server_id", ["placeholder"])) for word in (
        "10.*.*.*", "xx.xx.xx.xx", "10.xxx.xxx.1", "192.168.1.x", "...", "<server ip>", "IP of the master", "")),
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_table_is_read(name):
    assert read_cluster(TABLES / f"{name}.json").machines == tuple(RIGHT[name])


WHERE = {name: PLACES.get(name, ": " + field) for name, (field, _) in WRONG.items()}


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        *(pytest.param(_table(name), WHERE[name], said, id=name) for name, (_, said) in WRONG.items()),
        *((text, f": {field}", said) for text, (field, said) in MADE),
    ],
)
def test_a_wrong_table_is_refused_with_the_path_of_its_field(text, where, said):
    with pytest.raises(UserError) as caught:
        rank_table.read(text, "table.json")
    assert all(words in str(caught.value) for words in said)
    assert caught.value.hints
    assert caught.value.where == f"table.json{where}"


@PROPERTY
@given(st.data())
def test_a_table_with_any_card_or_rank_broken_is_refused(data):
    table = json.loads(_table("right_16"))
    server = data.draw(st.integers(0, 1))
    card = data.draw(st.integers(0, 7))
    field = data.draw(st.sampled_from(["rank_id", "device_id"]))
    device = table["server_list"][server]["device"][card]
    wrong = data.draw(st.one_of(st.integers(), st.none(), st.text(max_size=4), st.integers(-3, 20).map(str)))
    another = field == "device_id" and isinstance(wrong, str) and re.fullmatch(r"[89]|[1-9][0-9]+", wrong)
    if wrong == device[field] or another:
        return
    device[field] = wrong
    with pytest.raises(UserError) as caught:
        rank_table.read(json.dumps(table, indent=1), "table.json")
    assert re.search(r"table.json: server_list\[\d\]", caught.value.where)


class _Clock:
    """Time that passes only while somebody sleeps, and what happens then."""

    def __init__(self, monkeypatch, path, texts):
        self.now = 0.0
        self.path = path
        self.texts = list(texts)
        monkeypatch.setattr(rank_table, "time", SimpleNamespace(monotonic=self, sleep=self.sleep))

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.texts:
            self.path.write_text(self.texts.pop(0), encoding="utf-8")


def test_a_table_that_is_being_written_is_waited_for(monkeypatch, tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text("")
    begun = _table("wrong_initializing")
    clock = _Clock(monkeypatch, path, [begun[:100], begun, begun, _table("right_16")])
    assert rank_table.wait(path, 60) == _table("right_16")
    assert not clock.texts
    said = f"waiting up to 60 s for the rank table {path} to be completed: the end of the file is missing"
    assert capsys.readouterr().err == f"manyhands: {said}\n"
    path.write_text(begun)
    clock.texts = [_table("right_16")]
    rank_table.wait(path, 60)
    assert 'its status is "initializing"' in capsys.readouterr().err
    rank_table.wait(path, 0.1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "length", "patience_s", "waited_s", "said"),
    [
        ("wrong_initializing", None, 60, 60, "not completed within 60 s"),
        ("right_16", 300, 5, 5, "the rank table is not valid JSON"),
        ("wrong_rank_gap", None, 60, 0, "rank_id"),
    ],
)
def test_waiting_ends_and_a_mistake_is_not_waited_out(name, length, patience_s, waited_s, said, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(_table(name)[:length])
    clock = _Clock(monkeypatch, path, [])
    with pytest.raises(UserError, match=said):
        rank_table.read(rank_table.wait(path, patience_s), "")
    assert clock.now == waited_s


def _environment(tmp_path, name, **more):
    path = tmp_path / "table.json"
    path.write_text(_table(name))
    return {"RANK_TABLE_FILE": str(path), **more}


def test_every_rank_has_its_place(tmp_path):
    for rank in range(16):
        variables = _environment(tmp_path, "right_16", RANK_ID=str(rank), RANK_SIZE="16", DEVICE_ID=str(rank % 8))
        place = rank_table.place(variables)
        assert (place.rank, place.size, place.local_rank, place.local_size) == (rank, 16, rank % 8, 8)
        assert (place.device_index, place.master_address, place.master_port) == (rank % 8, "10.0.0.1", 29500)
        assert place.origins["rank"] == "RANK_ID"
    on_any_card = rank_table.place(_environment(tmp_path, "right_2_on_second_ring", RANK_ID="1", MASTER_PORT="1234"))
    assert (on_any_card.local_rank, on_any_card.device_index, on_any_card.master_port) == (1, 5, 1234)
    assert rank_table.place(_environment(tmp_path, "right_8")) is None
    assert rank_table.place({"RANK_ID": "0"}) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK_ID": "8"}, "RANK_ID is 8; expected 0 … 7"),
        ({"RANK_ID": "0", "RANK_SIZE": "16"}, "RANK_SIZE is 16; expected 8"),
        ({"RANK_ID": "1", "DEVICE_ID": "0"}, "DEVICE_ID is 0; expected 1"),
        ({"RANK_ID": "-1"}, 'RANK_ID is not a number: "-1"'),
        ({"RANK_ID": "0", "RANK_TABLE_FILE": "nowhere.json"}, "there is no file nowhere.json"),
    ],
)
def test_variables_that_contradict_the_table_are_refused(tmp_path, variables, said):
    with pytest.raises(UserError, match=re.escape(said)):
        rank_table.place({**_environment(tmp_path, "right_8"), **variables})


def test_addresses_of_cards_come_from_hccn_conf(monkeypatch, tmp_path):
    conf = tmp_path / "hccn.conf"
    monkeypatch.setattr(rank_table, "HCCN", conf)
    assert read_hccn() == {}
    conf.write_text("# cards\naddress_0=192.168.100.101\nnetmask_0=255.255.255.0\naddress_1 = 192.168.101.101\n")
    table = rank_table.read_table(rank_table.write(Cluster((Machine("10.0.0.1", 2),)))[0], "")
    assert [card.device_ip for card in table.server_list[0].device] == ["192.168.100.101", "192.168.101.101"]
    conf.write_text("address_0=192.168\n")
    with pytest.raises(UserError, match=r'address_0 is "192\.168"') as caught:
        read_hccn()
    assert caught.value.where == f"{conf}, line 1"


def test_names_out_of_order_are_written_beside_addresses():
    cluster = Cluster((Machine("10.0.0.9", 8), Machine("10.0.0.10", 8)))
    text, _ = rank_table.write(cluster)
    assert '"server_id": "node_0"' in text
    assert rank_table.read(text, "") == cluster
    with pytest.raises(UserError, match="order of their names"):
        rank_table.write(Cluster((Machine("n9", 8), Machine("n10", 8))))
