"""Runs a function on several real processes, with gloo unless told otherwise, and brings back what each returned."""

import functools
import importlib
import os
import pickle
import platform
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from manyhands.core.choices import module_names
from manyhands.core.world import World

# What torch's wrappers, optimizers and checkpoints import when they are first used, and what we do.
IMPORTED_LATE = (
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.elastic.agent.server",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "manyhands.data.datasets.synthetic",
    "manyhands.parallel.split.network", "manyhands.sync.local", "manyhands.sync.powersgd", "manyhands.sync.measure",
)  # fmt: skip


@functools.cache
def _import_late():
    """Imports it once, so that not every forked process does so by itself, which takes seconds of each."""
    modes = "manyhands.parallel.modes"
    for name in (*IMPORTED_LATE, *(f"{modes}.{mode}" for mode in module_names(modes))):
        importlib.import_module(name)


def _child(rank, size, function, arguments, folder, device, backend):
    if device != "cpu":
        device = device if ":" in device else f"{device}:{rank}"
        torch.accelerator.set_device_index(device)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    # Nobody leaves before all are connected, however little it has to do.
    dist.barrier()
    try:
        result = function(World(rank, size, rank, size, device, backend), *arguments)
        (Path(folder) / f"{rank}.out").write_bytes(pickle.dumps(result))
    except BaseException:
        (Path(folder) / f"{rank}.err").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def put_on_machines(machines, world):
    """Has this process believe that it is on one of several machines, which are given by their ranks."""
    place = next(place for place, ranks in enumerate(machines) if world.rank in ranks)
    platform.node = lambda: f"machine {place}"


def run_on_ranks(function, size, *arguments, start="fork", device="cpu", backend="gloo"):
    """function(world, *arguments) on `size` processes; a list of what they returned, by rank.

    Forked ones start at once but inherit this process's memory; "spawn" starts with a memory of their own. All use one
    device; a type without a number, such as npu, gives each its own.
    """
    if size == 1:
        return [function(World(device=device), *arguments)]
    if start == "fork":
        _import_late()
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = (size, function, arguments, folder, device, backend)
            started = mp.start_processes(_child, given, nprocs=size, start_method=start, join=False)
            while not started.join(grace_period=5):  # the others write their own errors
                pass
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.err"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(size)]
