"""Runs a function on several real processes, with gloo by default, and returns their results.

As a program it is one of these processes.
"""

import contextlib
import math
import os
import pickle
import platform
import select
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from manyhands.core.world import World
from tests.fork_server import import_late_modules, request_fork

RANK_MODULE, GRACE_S = "tests.processes.ranks", 5  # in which the other ranks write their own errors


def put_on_machines(machines, world):
    """Has this process believe that it is on one of several machines, which are given by their ranks."""
    place = next(place for place, ranks in enumerate(machines) if world.rank in ranks)
    platform.node = lambda: f"machine {place}"


def run_on_ranks(function, size, *arguments, start="server", device="cpu", backend="gloo"):
    """function(world, *arguments) on `size` processes; a list of what they returned, by rank.

    They are forks of the fork server, which import the module of `function`. With "fork", they are forks of this
    process, which inherit what a test has replaced in it; with "spawn", new processes. All use one device; a type
    without a number, such as npu, gives each its own.
    """
    if size == 1:
        return [function(World(device=device), *arguments)]
    with tempfile.TemporaryDirectory() as folder:
        call = (size, function, arguments, folder, device, backend)
        try:
            if start == "server":
                _run_in_forks_of_server(size, Path(folder), call)
            else:
                _run_in_children(size, call, start)
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("*.err"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [pickle.loads((Path(folder) / f"{rank}.out").read_bytes()) for rank in range(size)]


def run_rank(rank, size, function, arguments, folder, device, backend):
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


def _run_in_children(size, call, start):
    if start == "fork":
        import_late_modules()
    started = mp.start_processes(run_rank, call, nprocs=size, start_method=start, join=False)
    while not started.join(grace_period=GRACE_S):
        pass


def _run_in_forks_of_server(size, folder, call):
    (folder / "call").write_bytes(pickle.dumps(call))
    with contextlib.ExitStack() as stack:  # a closed socket ends its fork
        forks = [stack.enter_context(request_fork(RANK_MODULE, [folder, rank])) for rank in range(size)]
        end_s, failed = math.inf, []
        while forks and time.monotonic() < end_s:
            for fork in select.select(forks, [], [], max(0, min(end_s - time.monotonic(), 1)))[0]:
                forks.remove(fork)
                if (code := fork.recv(8)) != b"0":
                    failed.append(code.decode())
                    end_s = min(end_s, time.monotonic() + GRACE_S)
    if failed:
        raise ChildProcessError(f"ranks ended with exit codes {failed}")


if __name__ == "__main__":
    warnings.simplefilter("error")
    run_rank(int(sys.argv[2]), *pickle.loads((Path(sys.argv[1]) / "call").read_bytes()))
