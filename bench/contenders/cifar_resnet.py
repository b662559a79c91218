"""ResNet-18 on pictures of CIFAR-10's shape, 64 on each of 2 processes: a bare loop under DDP, Accelerate, Lightning.

    torchrun --nproc-per-node 2 cifar_resnet.py bare|accelerate STEPS
    python cifar_resnet.py lightning STEPS

Prints how many images a second both processes together learnt from, once warm.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.utils.data import DataLoader, TensorDataset

from manyhands.models.build import build_model
from manyhands.models.options import ModelOptions

PROCESSES, BATCH, WARM_UP, SAMPLES = 2, 64, 3, 4096
RATE, MOMENTUM, DECAY = 0.01, 0.9, 5e-4


class Stopwatch:
    """Called after each step; True when the last is over, whose rate the first process then prints."""

    def __init__(self, name, steps):
        self.name, self.steps, self.done, self.began = name, steps, 0, 0.0

    def __call__(self, *, reports):
        self.done += 1
        if self.done == WARM_UP:
            self.began = time.perf_counter()
        over = self.done == WARM_UP + self.steps
        if over and reports:
            rate = self.steps * BATCH * PROCESSES / (time.perf_counter() - self.began)
            sys.stdout.write(json.dumps({"contender": self.name, "images_per_s": rate}) + "\n")
            sys.stdout.flush()
        return over


def network():
    torch.manual_seed(0)
    return build_model(ModelOptions(name="resnet18"), channels=3, size=32, num_classes=10)


def samples():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


def endless(loader):
    while True:
        yield from loader


def bare(steps):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images, labels = samples()
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer, over = optimizer_of(model), Stopwatch("bare", steps)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))[rank::PROCESSES]
    for part in endless(order.split(BATCH)):
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
        if over(reports=rank == 0):
            break
    dist.destroy_process_group()


def accelerate(steps):
    from accelerate import Accelerator

    with_it = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*samples()), batch_size=BATCH, shuffle=True)
    model = network()
    model, optimizer, loader = with_it.prepare(model, optimizer_of(model), loader)
    over = Stopwatch("accelerate", steps)
    for images, labels in endless(loader):
        optimizer.zero_grad()
        with_it.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        if over(reports=with_it.is_main_process):
            break
    with_it.end_training()


def lightning(steps):
    import lightning as tool

    class Classifier(tool.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, number):  # noqa: ARG002 - Lightning's signature
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer_of(self)

    class Timing(tool.Callback):
        over = Stopwatch("lightning", steps)

        def on_train_batch_end(self, trainer, *_):
            self.over(reports=trainer.is_global_zero)

    trainer = tool.Trainer(
        accelerator="cpu", devices=PROCESSES, strategy="ddp", max_steps=WARM_UP + steps, max_epochs=-1, logger=False,
        callbacks=[Timing()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(*samples()), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"bare": bare, "accelerate": accelerate, "lightning": lightning}[sys.argv[1]](int(sys.argv[2]))
