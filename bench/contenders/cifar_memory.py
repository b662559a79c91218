"""CIFAR-10's training pictures in memory, a small network, and the barest loop under DDP: torchrun … STEPS."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

SAMPLES, BATCH = 50_000, 64


def main():
    dist.init_process_group("gloo")
    steps, rank = int(sys.argv[1]), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer, done = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), 0
    while done < steps:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(done))[rank::2]
        for part in order.split(BATCH):
            optimizer.zero_grad()
            images = (pictures[part].float() / 255 - 0.5) / 0.25
            F.cross_entropy(model(images), labels[part]).backward()
            optimizer.step()
            done += 1
            if rank == 0 and done % 100 == 0:
                sys.stdout.write(f"{done}\n")
                sys.stdout.flush()
    dist.destroy_process_group()


main()
