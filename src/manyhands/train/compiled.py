"""A network whose usual training passes run compiled, and all others as they are.

Each other number of samples would be compiled anew, half a minute for one smaller batch: the last of an epoch, those of
an evaluation, a batch shared otherwise.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.core.quantities import short_time
from manyhands.core.seeds import derive
from manyhands.data.places import own_folder
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.norm import NormGroups
from manyhands.train.draws import drawing
from manyhands.train.feed import LoadedMicroBatch
from manyhands.train.rehearse import first_samples, left_as_it_was
from manyhands.train.trainer import Trainer


def keep_compiled() -> None:
    """Has torch keep what it compiles in a folder of this user's alone, unless the user has named one.

    Its own place, which it notes in that variable, is in /tmp: anybody could have made it, and what lies there is run.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if not named or Path(named).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder("compiled"))


class CompiledPasses:
    """Runs a network's passes in the place of its `__call__`."""

    def __init__(self, model: nn.Module, norms: NormGroups) -> None:
        keep_compiled()
        self._model, self._norms = model, norms
        self.shown: set[Any] = set()  # what is compiled: passes like those that it has been shown
        self._learns = False
        model.compile(dynamic=False)
        self._compiled: Any = model._compiled_call_impl
        model._compiled_call_impl = self

    def release(self) -> None:
        """Gives the network its own way back."""
        self._model._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = self._kind(args)
        if self._learns and kind:
            self.shown.add(kind)
        run = self._compiled if kind in self.shown else self._model._call_impl
        return run(*args, **kwargs)

    def _kind(self, args: tuple[Any, ...]) -> Any:
        """What a pass must be alike in; None for one that isn't compiled, since others take part in its middle."""
        if not self._model.training or not torch.is_grad_enabled() or self._norms.shared_sizes:
            return None
        shapes = tuple(one.shape for one in args if isinstance(one, torch.Tensor))
        return shapes, self._norms.spans, self._norms.batch

    @contextmanager
    def learning(self) -> Generator[None]:
        """The passes within are shown to it."""
        self._learns = True
        try:
            yield
        finally:
            self._learns = False


def compiled(trainer: Trainer) -> Trainer:
    """Has the trainer's updates run compiled where its job asks for that; a collective.

    The passes of a whole update are shown before the first one, so that nobody takes the wait for a process that hangs.
    The network is left as it was.
    """
    if trainer.job.train.compile is not True:
        return trainer
    network, update, feed = trainer.network, trainer.update, trainer.feed
    passes, release, count = (
        CompiledPasses(network.inner, network.norms),
        trainer.release,
        min(feed.order.batch, feed.order.length),
    )
    options, world = update.options, trainer.world
    gradients = Gradients(
        network, world, update.loss_fn, smoothing=options.label_smoothing, precision=options.precision
    )
    drawn = drawing(derive(options.seed, "compile"), world.device.partition(":")[0])
    began = time.monotonic()
    if not network.norms.shared_sizes:
        trainer.journal.event(
            "note", "compiling the network, which may take some minutes; what was made before is kept"
        )
    with left_as_it_was(network.inner, network.norms), drawn, passes.learning():
        for shares in feed.cut.micro_batches(count):
            share = shares[network.replica(world.rank)]
            batch = first_samples(feed.loader, max(1, share.count))
            loaded = LoadedMicroBatch(share, batch, (shares[0].start, shares[-1].stop), feed.cut.group)
            gradients.forward_backward(loaded.micro_batch(count, 0), count, last=False)
    if passes.shown:
        trainer.journal.event("note", f"compiled the network in {short_time(time.monotonic() - began)}")
    else:
        trainer.journal.event("note", "nothing is compiled: processes share groups of BatchNorm (train.norm_group)")

    def release_both() -> None:
        passes.release()
        release()

    trainer.release = release_both
    return trainer
