"""As little as DDP allows: all pictures normalized in memory, a permutation each epoch, a plain loop. For torchrun.

With `--alone` each process trains a network of its own, and nothing is sent: what averaging for nothing would give.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import MNIST

from bench.contenders.shared import BATCH, DEVIATION, MEAN, RATE, Clock, arguments, make_network


def main():
    given, alone = arguments(), "--alone" in sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    dataset = MNIST(given.data, train=True)
    images, labels = ((dataset.data / 255 - MEAN) / DEVIATION).unsqueeze(1), dataset.targets
    torch.manual_seed(0)
    model = make_network() if alone else DistributedDataParallel(make_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    clock = Clock("alone" if alone else "bare", given.steps)
    generator = torch.Generator().manual_seed(0)
    over = False
    while not over:
        order = torch.randperm(len(images), generator=generator)[rank::size]
        for samples in order.split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[samples]), labels[samples])
            loss.backward()
            optimizer.step()
            over = clock.step()
            if over:
                break
    if rank == 0:
        clock.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
