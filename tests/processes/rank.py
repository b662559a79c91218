"""One of the processes that run a function together (tests.processes.ranks)."""

import os
import pickle
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.core.world import World


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


if __name__ == "__main__":
    warnings.simplefilter("error")
    run_rank(int(sys.argv[2]), *pickle.loads((Path(sys.argv[1]) / "call").read_bytes()))
