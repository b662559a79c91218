"""The DDP introduction's script: torchvision's pictures, DataLoader, DistributedSampler, DDP, mp.spawn."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from bench.contenders.shared import BATCH, PROCESSES, RATE, Clock, arguments, make_network, pictures


def train(rank, port, given):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    dataset = pictures(given.data)
    sampler = DistributedSampler(dataset, num_replicas=PROCESSES, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(make_network())
    loss_fn = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=RATE)
    clock = Clock("document", given.steps)
    over, epoch = False, 0
    while not over:
        model.train()
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                print(f"rank {rank}, epoch {epoch}, loss {loss.item():.4f}", file=sys.stderr)
            over = clock.step()
            if over:
                break
        epoch += 1
    if rank == 0:
        clock.report()
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    mp.spawn(train, args=(free_port(), arguments()), nprocs=PROCESSES, join=True)
