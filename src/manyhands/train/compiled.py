"""`train.compile`: torch.compile for the forward and backward passes of an update.

Passes with another number of samples (the last batch of an epoch, an evaluation, other shares) run eagerly: each would
be compiled anew, which takes half a minute or more.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.core.quantities import short_time
from manyhands.core.seeds import derive
from manyhands.data.places import own_folder
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.replicas.batch_norm import NormGroups
from manyhands.train.draws import drawing
from manyhands.train.feed import LoadedMicroBatch
from manyhands.train.trainer import Trainer
from manyhands.train.trial_step import first_samples, left_as_it_was


def keep_compiled() -> None:
    """Stores torch's compiled code in a folder that only this user can write, unless TORCHINDUCTOR_CACHE_DIR is set.

    torch's default folder is in /tmp, where any user can create it first, and its files are executed.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if not named or Path(named).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder("compiled"))


class _CompiledCalls:
    """Replaces a network's `__call__`: passes run while `learning` are compiled, others are not compiled anew."""

    def __init__(self, model: nn.Module, norms: NormGroups) -> None:
        keep_compiled()
        self._model, self._norms, self.learning, self.used = model, norms, True, False
        model.compile(dynamic=False)
        self._compiled: Any = model._compiled_call_impl
        model._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._norms.shared_sizes:  # other processes take part in this pass
            return self._model._call_impl(*args, **kwargs)
        self.used |= self.learning
        with torch.compiler.set_stance("default" if self.learning else "eager_on_recompile"):
            return self._compiled(*args, **kwargs)


def compiled(trainer: Trainer) -> Trainer:
    """Compiles the updates of the trainer if the job sets train.compile; a collective.

    Runs the passes of one update before training, so that compilation is not reported as a stall. Buffers and gradients
    of the network are restored.
    """
    if not trainer.job.train.compile:
        return trainer
    network, update, feed, release = trainer.network, trainer.update, trainer.feed, trainer.release
    calls, count = _CompiledCalls(network.model, network.norms), min(feed.order.batch, feed.order.length)
    options, world = update.options, trainer.world
    gradients = Gradients(
        network, world, update.loss_fn, smoothing=options.label_smoothing, precision=options.precision
    )
    drawn = drawing(derive(options.seed, "compile"), world.device.partition(":")[0])
    began = time.monotonic()
    if not network.norms.shared_sizes:
        trainer.journal.event(
            "note", "compiling the network, which may take some minutes; compiled code is cached for the next run"
        )
    with left_as_it_was(network.model, network.norms), drawn:
        for shares in feed.sharing.micro_batches(count):
            share = shares[network.share.index]
            batch = first_samples(feed.loader, max(1, share.count))
            loaded = LoadedMicroBatch(share, batch, (shares[0].start, shares[-1].stop), feed.sharing.group)
            gradients.forward_backward(loaded.micro_batch(count, 0), count, last=False)
    calls.learning = False
    if calls.used:
        trainer.journal.event("note", f"compiled the network in {short_time(time.monotonic() - began)}")
    else:
        trainer.journal.event("note", "torch.compile is skipped: processes share BatchNorm groups (train.norm_group)")

    def release_both() -> None:
        network.model._compiled_call_impl = None
        release()

    trainer.release = release_both
    return trainer
