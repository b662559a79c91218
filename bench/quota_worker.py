"""One of bench.plan_quota's processes: makes updates of a job in the mode data, and says how long each took."""

import json
import sys
from types import SimpleNamespace

import torch.distributed as dist

from bench.group import joined
from manyhands.cli.flags import settings
from manyhands.config.load import load_job
from manyhands.planner.trial import Runner, _slowest
from manyhands.worker.plan_case import network_of
from manyhands.worker.plan_trials import case_of


def main():
    rank, size, init, updates, data, model, _, batch, *rest = sys.argv[1:]
    flags = {"data.name": data, "model.name": model, "train.batch": int(batch), **settings(rest[1::2])}
    job = load_job(flags).job
    given = SimpleNamespace(rank=int(rank), size=int(size), init=init)
    with joined(given) as world:
        runner = Runner(case_of(job, network_of(job), "cpu"), None, world)
        runner.update()
        runner.update()
        taken = [_slowest(runner.update, world) * 1e3 for _ in range(int(updates))]
        dist.barrier()
    if world.is_main:
        print(json.dumps(taken))


if __name__ == "__main__":
    main()
