"""Lightning: a module, a Trainer that starts its own second process, and the DDP introduction's loader."""

import lightning
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.utils.data import DataLoader

from bench.contenders.shared import BATCH, PROCESSES, RATE, WARM_UP, Clock, arguments, make_network, pictures


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = make_network()

    def training_step(self, batch, number):  # noqa: ARG002 - Lightning's signature
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Timing(lightning.Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, trainer, *_):
        if self.clock.step() and trainer.is_global_zero:
            self.clock.report()


def main():
    given = arguments()
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy="ddp",
        max_steps=WARM_UP + given.steps,
        max_epochs=-1,
        callbacks=[Timing(Clock("lightning", given.steps))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(pictures(given.data), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
