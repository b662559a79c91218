"""Accelerate: its prepare() around the DDP introduction's loop. For torchrun."""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from accelerate import Accelerator
from torch.utils.data import DataLoader

from bench.contenders.shared import BATCH, PROCESSES, RATE, Clock, arguments, make_network, pictures


def main():
    given = arguments()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != PROCESSES:
        raise SystemExit(f"{accelerator.num_processes} processes where {PROCESSES} were asked for")
    model = make_network()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        DataLoader(pictures(given.data), batch_size=BATCH, shuffle=True),
    )
    clock = Clock("accelerate", given.steps)
    over = False
    while not over:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            over = clock.step()
            if over:
                break
    if accelerator.is_main_process:
        clock.report()
    accelerator.end_training()


if __name__ == "__main__":
    main()
