"""Which processes agree with each other, over which link, and what keeps local steps in time."""

import platform
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.config.job import ClusterOptions, Job
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.sync.compress import create_compressor
from manyhands.sync.costs import Cost
from manyhands.sync.exchange import SyncGroup
from manyhands.sync.link_speeds import link_seconds
from manyhands.sync.local import LocalSteps
from manyhands.sync.measure import measure_link
from manyhands.sync.methods.local import PaceAdapter, pace_from_cost
from manyhands.sync.options import SyncOptions
from manyhands.sync.synchronizer import Buffers
from manyhands.train import status
from manyhands.train.choose_sync import make_synchronizer, sync_groups
from manyhands.train.journal import Journal
from manyhands.train.status import SpeedMonitor, StatusRound
from manyhands.train.step import StepSums
from manyhands.train.trial_step import TIMED
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import SyncedNetwork, assert_alike, lines, trained

# By rank: (name of its machine, processes there, its local rank there); and the ranks of each machine.
DEALT = {
    "blocks": ([("a", 2, 0), ("a", 2, 1), ("b", 2, 0), ("b", 2, 1)], [(0, 1), (2, 3)]),
    "turns": ([("a", 2, 0), ("b", 2, 0), ("a", 2, 1), ("b", 2, 1)], [(0, 2), (1, 3)]),
    "uneven": ([("b", 1, 0), ("a", 3, 0), ("a", 3, 1), ("a", 3, 2)], [(0,), (1, 2, 3)]),
    "uneven turns": ([("a", 3, 0), ("b", 1, 0), ("a", 3, 1), ("a", 3, 2)], [(0, 2, 3), (1,)]),
    "one name": ([("x", 2, 0), ("x", 2, 1), ("x", 2, 0), ("x", 2, 1)], [(0, 1), (2, 3)]),
    "one machine": ([("a", 4, 0), ("a", 4, 1), ("a", 4, 2), ("a", 4, 3)], [(0,), (1,), (2,), (3,)]),
    "one each": ([("x", 1, 0), ("x", 1, 0), ("x", 1, 0), ("x", 1, 0)], [(0,), (1,), (2,), (3,)]),
}
POWERSGD = Cost("powersgd", 0.0, 0.0)


def _dealt(world):
    """For each way of dealing: the leaders, this process's machine and group, and the mean gradient under powersgd."""
    found, job = {}, Job(sync=SyncOptions(method="powersgd"))
    for name, (dealt, _) in DEALT.items():
        host, size, local_rank = dealt[world.rank]
        platform.node = lambda host=host: host  # of this process alone
        places = sync_groups(replace(world, local_rank=local_rank, local_size=size), job)
        network = nn.Linear(3, 3)  # too small for factors, so that only 4 bits round
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        synchronizer = make_synchronizer(POWERSGD, job, network, [], world, places)
        synchronizer.before_update(0)
        synchronizer.before_last_micro_batch()
        network(torch.full((3,), float(world.rank + 1))).sum().backward()
        synchronizer.on_gradients()
        group = tuple(dist.get_process_group_ranks(places.group)) if places.group else None
        found[name] = places.leaders, places.machine, group, network.weight.grad.clone()
        synchronizer.close()
        dist.barrier()  # who is done waits for those that are still joining their group
    return found


def test_each_machine_has_a_leader_and_every_process_counts_alike():
    answers = run_on_ranks(_dealt, 4)
    for name, (_, machines) in DEALT.items():
        for rank, (leaders, machine, group, mean) in enumerate(answer[name] for answer in answers):
            assert leaders == tuple(one[0] for one in machines)
            assert machine == next(one for one in machines if rank in one)
            assert group == (None if len(machines) == 4 else machine)
            assert torch.equal(mean, answers[0][name][3])
            assert torch.allclose(mean, torch.full((3, 3), 2.5), rtol=0.05)


def _update(synchronizer):
    synchronizer.before_update(1)
    synchronizer.on_gradients()
    synchronizer.after_update(2)


def _silent(world):
    """Rank 1 lives, and says nothing."""
    for cost in (POWERSGD, *(Cost("local", 0.0, 0.0, every=1, delay=delay) for delay in (1, 0))):
        job = Job(cluster=ClusterOptions(collective_timeout_s=1.0), sync=SyncOptions(method=cost.method))
        synchronizer = make_synchronizer(cost, job, nn.Linear(4, 4), [], world, sync_groups(world, job))
        if world.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)time"):
                _update(synchronizer)
        dist.barrier()
    return True


def test_a_silent_peer_is_given_up_when_the_job_says_so(of_two):
    assert of_two[3] == (True, True)


def _where(world):
    """Without BatchNorm, on an accelerator; "meta" stands for one that isn't here."""
    place, cost = replace(world, device="meta"), Cost("local", 0.0, 0.0, every=1)
    network = nn.Linear(4, 4, device="meta")
    synchronizer = make_synchronizer(cost, Job(), network, [], place, sync_groups(world, Job()))
    return [synchronizer.anchor.device.type, synchronizer.buffers.averaged.device.type]


def test_what_is_agreed_on_lies_on_the_device_also_without_any_buffer(of_two):
    assert of_two[0] == (["meta", "meta"],) * 2


class _Rare(SyncedNetwork):
    """Uses a part of itself for larger batches than the trial's alone."""

    def __init__(self):
        super().__init__(idle=True)
        self.rare = nn.Linear(5, 5)

    def forward(self, pictures):
        output = self.body(pictures)
        return output + self.rare(output) if self.training and len(pictures) > 2 else output


class _Overflowing(SyncedNetwork):
    """Its gradients overflow while it is tried and timed, as they may in fp16; not in training."""

    def __init__(self):
        super().__init__(idle=True)
        self.tries = 1 + TIMED

    def forward(self, pictures):
        output = super().forward(pictures)
        if self.training and self.tries:
            self.tries -= 1
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


LOCAL = {"sync.method": "local", "sync.every": 3, "sync.delay": 2, "sync.codec": "int4"}


def test_what_the_trial_did_not_use_is_agreed_on_and_what_is_not_said_is_measured():
    """A measurement leaves the network as it was."""
    rare = [(_Rare, way) for way in (LOCAL, {"sync.method": "powersgd", "sync.rank": 1}, {"sync.method": "bf16"})]
    measured = (_Overflowing, {"sync.method": "local", "train.micro_batch": 5})
    cases = [(0, make, {**way, "train.max_steps": 13}) for make, way in (*rare, measured)]
    for one, other in (found := trained(2, cases)):
        assert_alike(other.model, one.model)
    assert not any(torch.equal(one.model["rare.weight"].float(), _Rare().rare.weight) for one, _ in found[:3])
    assert all(tensor.isfinite().all() for tensor in found[3][0].model.values())
    (event,) = [event for event in found[3][0].events if event["kind"] == "sync"]
    assert event["data"]["method"] == "local"
    assert event["data"]["step_s"] > 0


class _Paced:
    """Rank 0 of several processes, with steps of 0.1 s and exchanges as long as it is told."""

    def __init__(self, folder, now, total_steps=100_000, size=2, **said):
        folder.mkdir(exist_ok=True)
        self.folder, options = RunFolder(folder), SyncOptions(method="local", codec="int4", **said)
        self.journal, cost = Journal(self.folder, 0), Cost("local", 0.1, 1.0, 0.5, "int4", *now)
        compressor = create_compressor("int4", [(4,)], rank=1, seed=0, device="cpu", dtype=torch.float32)
        buffers, pace = Buffers([], SyncGroup()), pace_from_cost(cost, options)
        self.steps = LocalSteps([torch.zeros(4)], buffers, SyncGroup(), compressor, pace)
        hosts = [f"host-{rank}" for rank in range(size)]
        self.steps.adapt = PaceAdapter(self.steps, cost, options, total_steps, compressing_s=0.0)
        self.watcher = SpeedMonitor(self.steps, cost, World(0, size), hosts)

    def agree(self, exchange_s, *others_s, times=1):
        """Exchanges, which take longer by the clock of a process that must wait in them for the slowest."""
        for _ in range(times):
            slowest_s, pace, size = max(0.1, *others_s, 0.1), self.steps.pace, self.watcher.world.size
            waits_s = [pace.every * (slowest_s - step_s) for step_s in (0.1, *others_s)]
            self.steps.rounds, self.steps.exchange_s = self.steps.rounds + 1, exchange_s + waits_s[0]
            reported = self.watcher.numbers_to_sum(1.0, 10, 0.0)
            for rank, step_s in enumerate(others_s, 1):
                reported[rank], reported[size + rank] = step_s, exchange_s + waits_s[rank]
            self.watcher.observe(SimpleNamespace(extra=reported, waited_s=0.0), self.steps.rounds, self.journal)
        return self.steps.pace.every, self.steps.pace.delay

    def said(self, kind):
        return [event["message"] for event in lines(self.folder.events) if event["kind"] == kind]


def test_the_pace_follows_the_link(tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6))
    assert {paced.agree(0.5) for _ in range(5)} == {(7, 6)}
    assert paced.agree(5.0, times=5) == (65, 58)
    assert len(paced.said("sync")) == 1
    # A slow process makes no exchange seem long.
    assert _Paced(tmp_path / "slow", (7, 6)).agree(0.5, 0.2, times=12) == (4, 3)
    # The delay follows the link where a short run allows no more steps.
    short = _Paced(tmp_path / "short", (14, 3), total_steps=14 * 60)
    assert short.agree(1.1, times=5) == (14, 13)
    assert short.agree(0.25, times=5) == (4, 3)
    # What a user says of the pace is kept.
    assert _Paced(tmp_path / "every", (7, 6), every=7).agree(5.0, times=5) == (7, 6)
    assert _Paced(tmp_path / "delay", (7, 2), delay=2).agree(5.0, times=5) == (65, 2)


@pytest.mark.parametrize(("others_s", "named"), [
    ((0.16,), "rank 1 on host-1 takes 0.16 s a step, the other ranks 0.1 s"),
    ((0.1, 0.5), "rank 2 on host-2 takes 0.5 s a step, the other ranks 0.1 s"),
    ((0.04, 0.04), "rank 0 on host-0 takes 0.1 s a step, the other ranks 0.04 s"),
    ((0.12, 0.11), ""),
])  # fmt: skip
def test_who_is_slow_is_named_once(others_s, named, tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6), size=1 + len(others_s))
    paced.agree(0.5, *others_s, times=6)
    said = paced.said("slow")
    assert len(said) == bool(named)
    assert all(named in message for message in said)


def test_a_stall_is_reported_unless_it_is_usual(tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6))
    for stood_s in (9.0, 0.1, 0.2, 0.1, 8.0, 0.1, *[5.0] * 6):
        paced.watcher.observe(SimpleNamespace(extra=[0.1] * 4, waited_s=stood_s), 1, paced.journal)
    # Not the start; the broken link, and the first ones of a link that stays as slow.
    assert [message.split(" s,")[0].split()[-1] for message in paced.said("stall")] == ["8", "5", "5"]


def _reported(world):
    status.REPORT_S = 1.0
    status_round = StatusRound(world, 0.5, float("inf"))
    found = []
    for wait_s in (0.0, 1.2, 0.0):
        time.sleep(wait_s)
        found.append(status_round.sum_measurements(StepSums(), 1, stop=False).report_time)
    return found


def _of_two(world):
    links = [measure_link(None, world.device, budget_s) for budget_s in (1.0, 0.0)]
    return _where(world), _reported(world), links, _silent(world)


@pytest.fixture(scope="module")
def of_two():
    """By what is tried, what both processes found."""
    return list(zip(*run_on_ranks(_of_two, 2), strict=True))


def test_all_processes_get_the_same_link_and_a_small_budget_ends_the_measurement(of_two):
    (link, hasty), other = of_two[2]
    assert [link, hasty] == other
    # Between a slow modem and a machine's own memory.
    assert 1e4 < link.bytes_per_s < 1e12
    assert 0 <= link.latency_s < 1
    assert link_seconds("all_reduce", 3, 1 << 20, hasty) > 0
    assert link_seconds("all_reduce", 2, 1 << 30, measure_link(None, "cpu")) == 0


def test_all_hear_at_once_that_time_is_to_be_reported(of_two):
    assert of_two[1] == ([False, True, False],) * 2
