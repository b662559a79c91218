"""Which of several failures is the cause, who hears of it and when, and what is said where memory ran out."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.cluster.failures import Failed
from manyhands.config.load import load_job
from manyhands.core.records import FAILURE_FILE
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import ProcessInfo, World
from manyhands.parallel.group import join as group
from manyhands.parallel.group.join import FailureBroadcast, JoinedGroup
from manyhands.parallel.group.rendezvous import PeerFailure, is_peer_loss
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.worker.entry import run_training
from manyhands.worker.failure import describe_failure, explain_out_of_memory, publish_or_adopt_first_cause
from manyhands.worker.member import MET, GroupMember

# What torch 2.x and NCCL 2.2x print; gathered from their sources and users' reports.
DUPLICATE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:"
    "\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000"
)
GONE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
)
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=11173962, "
    "Timeout(ms)=600000) ran for 600031 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (dist.DistBackendError(DUPLICATE), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error, CUDA driver version is insufficient"), False),
        (dist.DistBackendError(GONE), True),
        (dist.DistBackendError(WATCHDOG), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (dist.DistNetworkError("The server socket has failed to listen (errno: 98 - Address already in use)."), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:3127"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_backends_own_error_is_a_cause_and_a_peers_end_is_not(error, consequence):
    assert is_peer_loss(error) == consequence


def failure(error, rank=0):
    return describe_failure(error, rank=rank, step=3, phase="train")


@pytest.fixture
def soon(monkeypatch):
    for name in ("LISTEN_S", "LEARN_S", "PATIENCE_S"):
        monkeypatch.setattr(group, name, 0.05)


def test_a_causes_words_reach_the_others_and_till_then_the_librarys_words_stay(soon, monkeypatch):
    store = dist.HashStore()
    with closing(FailureBroadcast(store, 0)) as one, closing(FailureBroadcast(store, 0)) as other:
        alone = publish_or_adopt_first_cause(SimpleNamespace(cause=other), failure(dist.DistBackendError(GONE)))
        monkeypatch.setattr(group, "LEARN_S", 10)
        publish_or_adopt_first_cause(SimpleNamespace(cause=one), failure(dist.DistBackendError(DUPLICATE), rank=1))
        record = publish_or_adopt_first_cause(SimpleNamespace(cause=other), failure(dist.DistBackendError(GONE)))
    assert alone.what.startswith("another process ended")
    assert "ncclRemoteError" in alone.what
    assert "rank 1 on" in record.what
    assert "Duplicate GPU detected" in record.what


def test_the_record_is_written_before_the_group_is_left(monkeypatch, tmp_path):
    """Leaving may wait for peers that are gone; the agent must know why by then."""
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "0.json"))
    folder = RunFolder(tmp_path / "run")
    folder.failures.mkdir(parents=True)
    job = load_job({"data.name": str(tmp_path / "nothing"), "model.name": "mlp"}, environment={}).job
    process_info = ProcessInfo(device="cpu")
    written = []
    monkeypatch.setattr(JoinedGroup, "leave", lambda _self, **_: written.append((tmp_path / "0.json").read_text()))
    with pytest.raises(Failed):
        run_training(job, process_info, folder, {}, print)
    assert json.loads(written[0])["rank"] == 0
    assert json.loads((folder.failures / "0.json").read_text())["phase"] == "build"


class _OnAnAccelerator:
    """A group whose collectives wait for ever where a peer has gone."""

    def __init__(self, store, ended):
        self.world, self.earlier_groups, self._store, self._ended = World(1, 2, device="cuda:1"), None, store, ended

    def listen(self, attempt, leave):
        self.cause = FailureBroadcast(self._store, attempt, leave)

    def abort(self):
        self._ended.set()


@pytest.mark.parametrize("started_by", ["--init", MET])
def test_on_an_accelerator_the_listener_writes_the_record_and_aborts(started_by, soon, monkeypatch, tmp_path, capsys):
    """No machine with two GPUs was there: the decision, with --init and with a rank table, and its order."""
    folder, ended = RunFolder(tmp_path / "run"), threading.Event()
    folder.failures.mkdir(parents=True)
    store = dist.HashStore()
    waiting = _OnAnAccelerator(store, ended)
    monkeypatch.setattr("manyhands.parallel.group.join.join", lambda *_: waiting)
    mine = GroupMember(ProcessInfo(rank=1, size=2, device="cuda", started_by=started_by), folder, "build")
    mine.join(load_job({"model.name": "mlp"}, environment={}).job, "", print)
    with closing(waiting.cause), closing(FailureBroadcast(store, 0)) as failing:
        failing.publish(PeerFailure.create(0, "n1", "KeyError: mine"))
        assert ended.wait(20)
    record = json.loads((folder.failures / "1.json").read_text())
    assert record["consequence"]
    assert "rank 0 on n1 failed first: KeyError: mine" in record["what"]
    assert "KeyError: mine" in capsys.readouterr().err


class Hungry(nn.Module):
    """Runs out of memory above so many samples: half as many in single precision."""

    def __init__(self):
        super().__init__()
        self.inner, self.fits, self.kinds = nn.Linear(64, 5), 1000, set()

    def forward(self, images):
        output = self.inner(images.flatten(1))
        self.kinds.add(output.dtype)
        if len(images) > self.fits // (1 if output.dtype == torch.bfloat16 else 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output


@pytest.mark.parametrize(("precision", "fits"), [("bf16", 4), ("fp32", 2)])
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_the_advice_is_tried_in_the_jobs_precision(tmp_path, precision, fits, phase):
    flags = {
        "data.name": "synthetic:40x1x8x8x5", "train.batch": 16, "train.evaluate_batch": 16,
        "train.precision": precision,
    }  # fmt: skip
    network = Hungry()
    job = load_job(flags, environment={}).job
    trainer = build(Parts.from_job(job, RunFolder(tmp_path), World(), "single", Objects(network)))
    network.fits, trainer.heartbeats.phase = 4, phase
    network.kinds.clear()
    hints = explain_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), trainer).hints
    trainer.resources.close()
    assert network.kinds == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert f"_batch={fits}" in hints[0]
    assert ("precision=bf16" in hints[-1]) == (precision == "fp32")
