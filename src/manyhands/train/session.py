"""A user's own training loop among other processes: who am I, collectives, and the pieces of the law.

Under plain `python` the session is one process; under torchrun or with `--init`'s variables it joins the group.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.seeds import derive
from manyhands.core.shown import say
from manyhands.core.world import World
from manyhands.data.loader import Loader
from manyhands.data.open import from_objects, resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.order import BatchSharing, Order, told_of_batch
from manyhands.data.splits import check_labels
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.apply import apply_mode, make_equal, resolve_mode
from manyhands.parallel.collectives import Subgroup, new_group, whole
from manyhands.parallel.gradients import Gradients
from manyhands.parallel.network import ModeRequest, ParallelNetwork
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.options import USUAL_MODE
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.evaluate import Evaluation, Evaluator
from manyhands.train.feed import Feed
from manyhands.train.loss import something
from manyhands.train.objects import metric_words
from manyhands.train.own_metrics import make_metrics


@dataclass
class PreparedNetwork:
    """A network, its optimizer, and each epoch's samples, ready for this process's part of the work."""

    network: ParallelNetwork
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    feed: Feed


class Session(Subgroup):
    """This process among all of a run; made by `manyhands.session()`.

    Attributes:
        world: rank, size, device and so on.
        job: the settings in force (seed, norm_group, micro_batch are used).
    """

    def __init__(self, world: World, job: Job) -> None:
        everybody = whole(world)
        super().__init__(everybody.ranks, everybody.rank, None)
        self.world, self.job = world, job
        self._prepared: PreparedNetwork | None = None
        self._share, self._count, self._last = 1, 1, True
        self._epoch = 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device(self.world.device)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which should do the printing."""
        return self.world.is_main

    def new_group(self, ranks: list[int]) -> Subgroup:
        """A subgroup; every process makes the same ones in the same order."""
        return new_group(self.world, ranks)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, train_set: Any, *, batch: int
    ) -> tuple[nn.Module, torch.optim.Optimizer, Iterable[tuple[Tensor, Tensor]]]:
        """Makes a network, its optimizer and its data ready for all processes.

        Args:
            model: on the CPU or this process's device; made equal on all processes.
            optimizer: of the model's own parameters.
            train_set: a torch Dataset of (x, y).
            batch: samples per update over all processes.

        Returns:
            The network to call, the optimizer, and an iterable of this process's (x, y), a new order each epoch.
        """
        if batch < self.size:
            raise UserError(f"batch is {batch}, and there are {self.size} processes to share it", "prepare")
        model.to(self.device)
        make_equal(dict(model.state_dict()), self.world)
        group = self.job.train.norm_group
        group_batch_norms(model)
        network = apply_mode(resolve_mode(USUAL_MODE, self.world), model, self.world, ModeRequest())
        loader = self._loader(train_set, model, train=True)
        length = len(train_set)
        smaller = told_of_batch(batch, length)
        if smaller and self.is_main:
            say(smaller)
        size = group if isinstance(group, int) else length if group == "global" else 0
        feed = Feed(
            Order(length, min(batch, length), self.job.train.seed), BatchSharing(self.size, 0, size), loader, self.rank
        )
        self._prepared = PreparedNetwork(network, Gradients(network, self.world), optimizer, feed)
        return network.call, optimizer, SessionSamples(self)

    def _loader(self, data: Any, model: nn.Module, *, train: bool, classes: int = 0) -> Loader:
        """Samples of the numbers that the network computes with; their labels are below `classes` where that is given.

        Raises:
            UserError: a label is beyond; of labels that must be read, when its sample is.
        """
        splits = from_objects(data, data, DataOptions(name="objects"))
        if classes and splits.train.labels is not None:
            check_labels(splits.train.labels, classes, "the data set")
        pixels = resolve_pixels(DataOptions(name="objects"), splits.pixels)
        seed = derive(self.job.train.seed, "augment")
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        dtype = torch.float64 if double else torch.float32
        device = self.world.device
        return Loader(splits.train, pixels, train=train, seed=seed, device=device, dtype=dtype, classes=classes)

    def epochs(self, count: int) -> Iterator[int]:
        """0 … count - 1; each has an order of its own."""
        for self._epoch in range(count):
            yield self._epoch

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of each update of the current epoch."""
        ready = self._ready()
        for update in ready.feed.updates(self._epoch, 0):
            part = update.micro_batches[0]
            self._share, self._count = part.share.count, update.count
            ready.network.begin(part.micro_batch(update.count, 0))
            yield part.batch.images, part.batch.labels
            ready.network.finish_update(self.size)

    def backward(self, loss: Tensor, weight: Tensor | float | None = None) -> None:
        """Backward of the mean loss over this process's samples, weighted by its share of the global batch.

        Args:
            loss: the mean [].
            weight: what this process's samples count for in it, where it is a weighted mean; their number if None.
                Given on all processes: it is added up.
        """
        gradients = self._ready().gradients
        if loss.numel() != 1:
            what = f"the loss is a tensor of {list(loss.shape)}"
            raise UserError(what, "session.backward", ("its mean over samples: loss.mean()",))
        share: Tensor | float = self._share / self._count
        if weight is not None:
            kind = torch.promote_types(loss.dtype, torch.float32)
            mine = torch.as_tensor(weight, dtype=kind, device=self.device).detach() * bool(self._share)
            share = mine / something(Synchronizer().added_up(mine.clone(), self.world))
        gradients.backward_of(loss, share)

    def evaluate(
        self, model: nn.Module, test_set: Any, classes: int | None = None, metrics: Mapping[str, Any] | None = None
    ) -> Evaluation:
        """Evaluates on all processes; each sample counts once."""
        network = getattr(model, "module", model)
        outputs = classes or self._outputs(network, test_set)
        loader = self._loader(test_set, network, train=False, classes=outputs)
        try:
            block = self.job.train.evaluate_batch
            own = make_metrics((*self.job.train.metrics, *(metric_words(metrics) or ())), metrics)
            evaluator = Evaluator(loader, len(test_set), outputs, block, self.world, metrics=own)
            return evaluator(network, contextlib.nullcontext())
        finally:
            loader.close()

    def _outputs(self, network: nn.Module, test_set: Any) -> int:
        loader = self._loader(test_set, network, train=False)
        batch = next(iter(loader.batches(0, [torch.arange(1)])))
        training = network.training
        with torch.inference_mode():
            count = main_and_auxiliary(network.eval()(batch.images))[0].shape[1]
        network.train(training)
        return count

    def _ready(self) -> PreparedNetwork:
        if self._prepared is None:
            raise UserError("call session.prepare(model, optimizer, train_set, batch=…) first", "session")
        return self._prepared


class SessionSamples:
    """Iterates over this process's part of each update of the session's current epoch."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._session.batches()
