"""A user's network whose module brings a fault to an exact place of a run, once: the environment says which and whose.

FAULT_AT names the place, FAULT_RANK the process, FAULT_STEP the updates before it, FAULT_MARKER the file that says that
it has come, FAULT_HOW the signal.
"""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from manyhands.checkpoint import folders
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.modes import data
from manyhands.parallel.modes.data import Replica
from manyhands.parallel.replicas.batch_norm import NormGroups
from manyhands.parallel.replicas.shared_memory import SharedSums
from manyhands.sync.exchange import SyncGroup
from manyhands.train.step import Updater

AT = SimpleNamespace(step=0, part="")  # updates made so far, and what this one is at


def act(place):
    """Does what the environment says, where this is the place, and the first time."""
    if os.environ.get("FAULT_AT") != place or AT.step < int(os.environ["FAULT_STEP"]):
        return
    marker = Path(os.environ["FAULT_MARKER"])
    if not dist.is_initialized() or dist.get_rank() != int(os.environ["FAULT_RANK"]) or marker.exists():
        return
    marker.with_suffix(".new").write_text(f"{time.time()} {AT.step} {os.getpid()} {threading.current_thread().name}")
    marker.with_suffix(".new").rename(marker)
    os.kill(os.getpid(), getattr(signal, os.environ["FAULT_HOW"]))


def wrap(owner, name, *, before=None, after=None):
    """Has something called before or after each call of a function, with the same arguments."""
    whole = getattr(owner, name)

    def call(*arguments, **named):
        if before:
            before(*arguments)
        result = whole(*arguments, **named)
        if after:
            after(*arguments)
        return result

    setattr(owner, name, call)


def in_backward():
    return torch._C._current_graph_task_id() != -1


def wait_for_sums(*_):
    if AT.part == "passes" and not in_backward():
        act("shared memory")


def add_up(*_):
    if in_backward():
        act("norm in backward")
    elif AT.part == "update":
        act("norm statistics")


def exchanged(*_):
    if threading.current_thread() is not threading.main_thread():
        act("thread")


def _mean(_, bucket):
    """What DDP does by itself; the fault comes while the sum is under way."""
    under_way = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    act("all-reduce")
    return under_way.then(lambda future: future.value()[0])


class _Replica(Replica):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.register_comm_hook(None, _mean)


if os.environ.get("FAULT_AT") == "all-reduce":
    data.Replica = _Replica
wrap(Updater, "begin", before=lambda *given: vars(AT).update(step=given[-1], part="passes"))
wrap(Updater, "finish", before=lambda *given: vars(AT).update(step=given[-1], part="update"))
wrap(Gradients, "step", after=lambda *_: act("stepped"))
wrap(SharedSums, "_wait", before=wait_for_sums)
wrap(NormGroups, "all_reduce", before=add_up)
wrap(folders, "commit_folder", before=lambda *_: act("saving"))
wrap(SyncGroup, "exchange", after=exchanged)
wrap(SyncGroup, "gather", after=exchanged)


class _Hit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        act("backward")
        return gradient


class Net(nn.Module):
    """With BatchNorm in the middle, whose groups processes share."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(48, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, num_classes))

    def forward(self, images):
        if not self.training:
            act("evaluation")
        return self.last(_Hit.apply(self.first(images)))
