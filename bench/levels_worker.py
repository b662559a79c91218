"""One of the processes of bench.two_levels, as bench.slow_worker is one of bench.slow_links."""

import argparse
import itertools
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from bench.group import joined
from bench.two_levels import MACHINES, NETWORKS, PICTURES, WAYS
from manyhands.parallel.levels import open_levels, time_both
from manyhands.parallel.modes import data
from manyhands.parallel.network import ModeRequest

# Of one turn.
BUDGET_S, FEWEST, MOST = 3.0, 3, 300


class Trained:
    """A network under one way of averaging, with all that an update needs."""

    def __init__(self, name, levels, world):
        torch.manual_seed(0)
        sizes = [int(word) for word in name.split("-")]
        layers = [nn.Linear(sizes[0], sizes[1])]
        for before, after in itertools.pairwise(sizes[1:]):
            layers += [nn.ReLU(), nn.Linear(before, after)]
        model = nn.Sequential(*layers)
        self.network = data.apply(model, world, ModeRequest(averaged={"levels": levels, "machines": MACHINES}))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self.pictures = torch.randn(PICTURES, sizes[0], generator=torch.Generator().manual_seed(world.rank))
        self.labels, self.weight = torch.arange(PICTURES) % sizes[-1], self.network.gradient_scale / world.size

    def update(self):
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.network.call(self.pictures), self.labels)
        (loss * self.weight).backward()
        self.network.finish_gradients()
        self.optimizer.step()
        return time.perf_counter() - started

    def measure(self):
        """Seconds of each of some updates, on the slowest process; and processor time of one."""
        warm_s = torch.tensor(self.update())
        dist.all_reduce(warm_s, dist.ReduceOp.MAX)
        before = time.process_time()
        taken_s = torch.tensor([self.update() for _ in range(max(FEWEST, min(MOST, int(BUDGET_S / float(warm_s)))))])
        computed_s = (time.process_time() - before) / len(taken_s)
        dist.all_reduce(taken_s, dist.ReduceOp.MAX)
        return {"seconds": taken_s.tolist(), "cpu_s": computed_s}


def chosen(world):
    """What a run would choose by itself on the link as it is, by network."""
    levels = open_levels(MACHINES, world)
    sizes = {"784-256-10": 814_120, "784-2800-2800-10": 40_291_240}
    times = {name: time_both(levels, sizes[name]) for name in NETWORKS}
    levels.close()
    return {name: [one.levels_s, one.backend_s, one.size_bytes] for name, one in times.items()}


def serve(world):
    trained = {(name, way): Trained(name, levels, world) for name in NETWORKS for way, levels in WAYS.items()}
    for one in trained.values():
        one.update()
        one.update()
    for line in sys.stdin:
        told = json.loads(line)
        answer = chosen(world) if told["do"] == "choose" else trained[told["network"], told["way"]].measure()
        print(json.dumps(answer), flush=True)
    for one in trained.values():
        one.network.release()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--init", required=True)
    given = parser.parse_args()
    with joined(given) as world:
        serve(world)


if __name__ == "__main__":
    main()
