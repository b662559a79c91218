"""Who agrees with whom, under any way of dealing ranks to machines; and what keeps local steps in time."""

import json
import platform
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from manyhands.config.job import ClusterOptions, Job
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import World
from manyhands.sync.compress import compressor_named
from manyhands.sync.costs import Cost
from manyhands.sync.exchange import SyncGroup
from manyhands.sync.local import LocalSteps
from manyhands.sync.methods.local import Pacer, pace_of
from manyhands.sync.options import SyncOptions
from manyhands.sync.synchronizer import Buffers
from manyhands.train import status
from manyhands.train.choose_sync import make_synchronizer, places_of
from manyhands.train.journal import Journal
from manyhands.train.status import LONGEST_S, StatusRound, Watcher
from manyhands.train.step import StepSums
from tests.processes.ranks import run_on_ranks

# By rank: (name of its machine, processes there, its local rank there).
DEALT = {
    "blocks": [("a", 2, 0), ("a", 2, 1), ("b", 2, 0), ("b", 2, 1)],
    "turns": [("a", 2, 0), ("b", 2, 0), ("a", 2, 1), ("b", 2, 1)],
    "uneven": [("b", 1, 0), ("a", 3, 0), ("a", 3, 1), ("a", 3, 2)],
    "uneven turns": [("a", 3, 0), ("b", 1, 0), ("a", 3, 1), ("a", 3, 2)],
    "one name": [("x", 2, 0), ("x", 2, 1), ("x", 2, 0), ("x", 2, 1)],
    "one machine": [("a", 4, 0), ("a", 4, 1), ("a", 4, 2), ("a", 4, 3)],
    "one each": [("x", 1, 0), ("x", 1, 0), ("x", 1, 0), ("x", 1, 0)],
}
MACHINES = {
    "blocks": [(0, 1), (2, 3)],
    "turns": [(0, 2), (1, 3)],
    "uneven": [(0,), (1, 2, 3)],
    "uneven turns": [(0, 2, 3), (1,)],
    "one name": [(0, 1), (2, 3)],
    "one machine": [(0,), (1,), (2,), (3,)],
    "one each": [(0,), (1,), (2,), (3,)],
}


def _places(world, dealt):
    name, size, local_rank = dealt[world.rank]
    platform.node = lambda: name  # of this process alone
    places = places_of(replace(world, local_rank=local_rank, local_size=size), Job())
    dist.barrier()  # who is done waits for those that are still joining their group
    return places.leaders, places.machine, dist.get_process_group_ranks(places.group) if places.group else None


@pytest.mark.parametrize("name", DEALT)
def test_each_machine_has_its_own_processes_and_one_that_speaks(name):
    machines = MACHINES[name]
    for rank, (leaders, machine, group) in enumerate(run_on_ranks(_places, 4, DEALT[name])):
        assert leaders == tuple(one[0] for one in machines)
        assert machine == next(one for one in machines if rank in one)
        assert group is None or tuple(group) == machine
        assert (group is None) == (len(machines) == 4)


def _agreed(world, dealt, cost):
    """The gradient that all agree on, and the mean of all their own."""
    name, size, local_rank = dealt[world.rank]
    platform.node = lambda: name
    job = Job(sync=SyncOptions(method=cost.method))
    places = places_of(replace(world, local_rank=local_rank, local_size=size), job)
    network = torch.nn.Linear(3, 3)  # too small for factors, so that only 4 bits round
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    synchronizer = make_synchronizer(cost, job, network, [], world, places)
    synchronizer.before_update(0)
    synchronizer.before_last_micro_batch()
    own = torch.full((3,), float(world.rank + 1))
    network(own).sum().backward()
    synchronizer.on_gradients()
    found = network.weight.grad.clone()
    synchronizer.close()
    dist.barrier()
    return found, torch.full((3, 3), (world.size + 1) / 2)


@pytest.mark.parametrize("name", ["blocks", "turns", "uneven", "uneven turns", "one each"])
def test_every_process_counts_alike_however_many_its_machine_has(name):
    answers = run_on_ranks(_agreed, 4, DEALT[name], Cost("powersgd", 0.0, 0.0))
    for found, mean in answers:
        assert torch.equal(found, answers[0][0])
        assert torch.allclose(found, mean, rtol=0.05)


def _update(synchronizer):
    synchronizer.before_update(1)
    synchronizer.on_gradients()
    synchronizer.after_update(2)


def _silent(world, cost):
    """Rank 1 lives, and says nothing."""
    job = Job(cluster=ClusterOptions(collective_timeout_s=1.0), sync=SyncOptions(method=cost.method))
    network = torch.nn.Linear(4, 4)
    synchronizer = make_synchronizer(cost, job, network, [], world, places_of(world, job))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            _update(synchronizer)
    dist.barrier()
    return True


@pytest.mark.parametrize("cost", [
    Cost("powersgd", 0.0, 0.0), Cost("local", 0.0, 0.0, every=1, delay=1), Cost("local", 0.0, 0.0, every=1),
], ids=str)  # fmt: skip
def test_a_silent_peer_is_given_up_when_the_job_says_so(cost):
    assert all(run_on_ranks(_silent, 2, cost))


def _where(world):
    """Without BatchNorm, on an accelerator; "meta" stands for one that isn't here."""
    place, cost = replace(world, device="meta"), Cost("local", 0.0, 0.0, every=1)
    network = torch.nn.Linear(4, 4, device="meta")
    synchronizer = make_synchronizer(cost, Job(), network, [], place, places_of(world, Job()))
    return [synchronizer.anchor.device.type, synchronizer.buffers.averaged.device.type]


def test_what_is_agreed_on_lies_on_the_device_also_without_any_buffer():
    assert run_on_ranks(_where, 2) == [["meta", "meta"]] * 2


class _Paced:
    """Rank 0 of several processes, with steps of 0.1 s and exchanges as long as it is told."""

    def __init__(self, folder, now, total_steps=100_000, size=2, **said):
        folder.mkdir(exist_ok=True)
        self.folder, options = RunFolder(folder), SyncOptions(method="local", codec="int4", **said)
        self.journal, cost = Journal(self.folder, 0), Cost("local", 0.1, 1.0, 0.5, "int4", *now)
        tensors = [torch.zeros(4)]
        compressor = compressor_named("int4", [(4,)], rank=1, seed=0, device="cpu", dtype=torch.float32)
        self.steps = LocalSteps(tensors, Buffers([], SyncGroup()), SyncGroup(), compressor, pace_of(cost, options))
        hosts = [f"host-{rank}" for rank in range(size)]
        self.steps.adapt = Pacer(self.steps, cost, options, total_steps, compressing_s=0.0)
        self.watcher = Watcher(self.steps, cost, World(0, size), hosts)

    def agree(self, exchange_s, *others_s):
        """One exchange, which takes longer by the clock of who must wait in it for the slowest."""
        slowest_s, pace, size = max(0.1, *others_s, 0.1), self.steps.pace, self.watcher.world.size
        waits_s = [pace.every * (slowest_s - step_s) for step_s in (0.1, *others_s)]
        self.steps.rounds, self.steps.exchange_s = self.steps.rounds + 1, exchange_s + waits_s[0]
        told = self.watcher.numbers_to_sum(1.0, 10, 0.0)
        for rank, step_s in enumerate(others_s, 1):
            told[rank], told[size + rank] = step_s, exchange_s + waits_s[rank]
        self.watcher.observe(SimpleNamespace(extra=told, waited_s=0.0), self.steps.rounds, self.journal)
        return self.steps.pace.every, self.steps.pace.delay

    def said(self, kind):
        lines = self.folder.events.read_text().splitlines() if self.folder.events.exists() else []
        return [event["message"] for event in map(json.loads, lines) if event["kind"] == kind]


def test_the_pace_follows_the_link(tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6))
    assert {paced.agree(0.5) for _ in range(5)} == {(7, 6)}
    assert [paced.agree(5.0) for _ in range(5)][-1] == (65, 58)
    assert len(paced.said("sync")) == 1


def test_a_slow_process_makes_no_exchange_seem_long(tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6))
    assert [paced.agree(0.5, 0.2) for _ in range(12)][-1] == (4, 3)


def test_the_delay_follows_the_link_where_a_short_run_allows_no_more_steps(tmp_path):
    paced = _Paced(tmp_path / "run", (14, 3), total_steps=14 * 60)
    assert [paced.agree(1.1) for _ in range(5)][-1] == (14, 13)
    assert [paced.agree(0.25) for _ in range(5)][-1] == (4, 3)


def test_what_a_user_says_of_the_pace_is_kept(tmp_path):
    often = _Paced(tmp_path / "every", (7, 6), every=7)
    assert [often.agree(5.0) for _ in range(5)][-1] == (7, 6)
    late = _Paced(tmp_path / "delay", (7, 2), delay=2)
    assert [late.agree(5.0) for _ in range(5)][-1] == (65, 2)


@pytest.mark.parametrize(("others_s", "named"), [
    ((0.16,), "rank 1 on host-1 takes 0.16 s a step, the other ranks 0.1 s"),
    ((0.1, 0.5), "rank 2 on host-2 takes 0.5 s a step, the other ranks 0.1 s"),
    ((0.04, 0.04), "rank 0 on host-0 takes 0.1 s a step, the other ranks 0.04 s"),
    ((0.12, 0.11), ""),
])  # fmt: skip
def test_who_is_slow_is_named_once(others_s, named, tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6), size=1 + len(others_s))
    for _ in range(6):
        paced.agree(0.5, *others_s)
    said = paced.said("slow")
    assert len(said) == bool(named)
    assert all(named in message for message in said)


def test_standing_still_is_told_of_unless_it_is_usual(tmp_path):
    paced = _Paced(tmp_path / "run", (7, 6))
    for stood_s in (9.0, 0.1, 0.2, 0.1, 8.0, 0.1, *[5.0] * 6):
        paced.watcher.observe(SimpleNamespace(extra=[0.1] * 4, waited_s=stood_s), 1, paced.journal)
    # Not the start; the cut, and the first ones of a link that stays as slow.
    assert [message.split(" s,")[0].split()[-1] for message in paced.said("stall")] == ["8", "5", "5"]


def test_a_slow_link_is_waited_for_but_not_for_minutes():
    status_round = StatusRound(World(), 0.5, float("inf"), multiple=1000)
    status_round.reset(0)
    status_round.add_up(StepSums(), 100_001, stop=False)  # steps of next to no time
    assert next(step for step in range(100_002, 103_000) if status_round.due(step, force=False)) % 1000 == 0
    time.sleep(0.05)
    status_round.add_up(StepSums(), 100_002, stop=False)
    assert not status_round.due(100_002, force=False)
    assert status_round.due(100_002 + round(LONGEST_S / 0.05), force=False)


def _told(world):
    status.REPORT_S = 1.0
    status_round = StatusRound(world, 0.5, float("inf"))
    found = []
    for wait_s in (0.0, 1.2, 0.0):
        time.sleep(wait_s)
        found.append(status_round.add_up(StepSums(), 1, stop=False).report_time)
    return found


def test_all_hear_at_once_that_time_is_to_be_told():
    assert run_on_ranks(_told, 2) == [[False, True, False]] * 2
