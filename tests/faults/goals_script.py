"""A plain training script as people write it for torchrun, and the network that manyhands trains beside it.

An update takes 0.2 s; a checkpoint is written every 20 updates, beside the old one and then put in its place. The
records are like those of a run folder, so that both are read alike.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

UPDATE_S, SAVE_EVERY = 0.2, 20


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, images):
        if self.training:
            time.sleep(UPDATE_S)
        return self.layers(images)


def note(folder, file, **values):
    if dist.get_rank() == 0:
        with (folder / file).open("a") as records:
            records.write(json.dumps({"time": time.time(), **values}) + "\n")


def main(folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    note(folder, "events.jsonl", kind="started", data={"processes": dist.get_world_size()})
    while True:
        loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(10, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        note(folder, "metrics.jsonl", kind="step", step=step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "checkpoint.new")
            (folder / "checkpoint.new").replace(saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
