"""Evaluation: each sample exactly once on any number of processes.

The split is cut into blocks of fixed size, and whole blocks are dealt out, more of them to whoever takes more of each
update. Each block is computed the same way wherever it lands, counts are integers, and each block's loss is added in
the order of the blocks: the result is the same to the last bit for any number of processes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.core.errors import RunError, UserError
from manyhands.core.mesh import bounds
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.order import dealt_blocks, evaluation_blocks
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.own_metrics import CustomMetric, FigureSums

# Processes ask each other about so often whether to stop.
ASK_S, MOST_BLOCKS = 1.0, 1000


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        count: the number of samples.
        loss: the mean cross-entropy, or the mean negative log-likelihood.
        top1: top-1 accuracy, 0 to 1.
        top5: top-5 accuracy, 0 to 1.
        cells: int64 [cells, 3], the nonzero cells of the confusion matrix: true class, predicted class, count.
        classes: the number of rows and columns of the matrix: the classes, or more if other outputs were predicted.
        seconds: the duration of the evaluation.
        metrics: the user's metrics, by name.
    """

    count: int
    loss: float
    top1: float
    top5: float
    cells: Tensor
    classes: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def figure(self, name: str) -> float:
        """Returns a value by its name: top1, top5, loss or a metric of the user."""
        return self.metrics[name] if name in self.metrics else getattr(self, name)

    @property
    def confusion(self) -> Tensor:
        """The confusion matrix, int64 [classes, classes]. Rows are true classes, columns predicted ones."""
        matrix = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix


class Interrupted(Exception):  # noqa: N818 - a wish, not an error
    """Somebody asked for a stop in the middle of an evaluation."""


class StopRequest:
    """Lets all processes stop at the same block of an evaluation, whoever of them was asked to.

    Args:
        world: who takes part.
        asked: true where this process was asked.
    """

    def __init__(self, world: World, asked: Callable[[], object]) -> None:
        self._world, self._asked = world, asked
        self._last, self._next, self._since = 0, 0, time.perf_counter()

    def check_stop(self, done: int) -> None:
        """To be called before each block, `done` of which are behind; every second or so it is a collective.

        All call it equally often; where some have more blocks, each at the same part of its own.

        Raises:
            Interrupted: on all processes alike.
        """
        if done < self._next:
            return
        now = time.perf_counter()
        mine = torch.tensor([float(bool(self._asked())), now - self._since], device=self._world.device)
        if not self._world.alone:
            dist.all_reduce(mine)
        stops, seconds = mine.tolist()
        if stops:
            raise Interrupted
        block_s = seconds / self._world.size / max(1, done - self._last)
        wanted = round(ASK_S / max(block_s, 1e-6)) if done else 1
        # Accelerators are handed the first blocks long before they are through them, so the pause only grows.
        self._next = done + min(MOST_BLOCKS, max(1, wanted), 2 * max(1, done - self._last))
        self._last, self._since = done, time.perf_counter()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Has a network evaluate, and leaves each layer in the mode it was in: some may be frozen."""
    training, before = model.training, [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for module, was in before:
            module.training = was


class Evaluator:
    """Evaluates a network on the test split.

    Args:
        loader: of the test split.
        length: samples in the split.
        classes: how many there are; the network may have more outputs, and a guess beyond is a wrong one.
        block: samples in a block.
        world: who takes part.
        log_probabilities: True when the network's output is log-probabilities (train.loss = "nll").
        network: that is evaluated, under its mode; None where each process has all of it.
        metrics: of the user's own.
        views: of each picture, whose outputs are averaged.
    """

    def __init__(  # noqa: PLR0913 - all but the first five are named
        self,
        loader: Loader,
        length: int,
        classes: int,
        block: int,
        world: World,
        *,
        log_probabilities: bool = False,
        network: ParallelNetwork | None = None,
        metrics: Sequence[CustomMetric] = (),
        views: int = 1,
    ) -> None:
        self._views = views
        self.loader, self.length, self.classes, self.world = loader, length, classes, world
        self.blocks = evaluation_blocks(length, block)
        self._log_probabilities, self._network = log_probabilities, network
        # On a mesh all processes compute each block together.
        self._together = network if network and network.together else None
        # Apple's devices know no float64.
        self._precise = torch.float32 if world.device == "mps" else torch.float64
        self._own = FigureSums(metrics, classes, world.device, self._precise) if metrics else None

    def __call__(
        self,
        model: nn.Module,
        autocast: contextlib.AbstractContextManager[object],
        asked: Callable[[], object] | None = None,
        shares: Sequence[int] = (),
    ) -> Evaluation:
        """Evaluates; the network is left in the mode it was in.

        Args:
            model: the network.
            autocast: entered for the length of it.
            asked: true where somebody has asked this process to stop; on all processes, or on none.
            shares: what each process takes of each update, by which blocks are dealt; empty where that is equal.

        Raises:
            RunError: the samples counted are not exactly those of the split.
            Interrupted: somebody was asked to stop, which all processes have agreed on.
        """
        started = time.perf_counter()
        # Not inference_mode: what a sharded network's first pass sets up under it could never be trained.
        with evaluating(model), torch.no_grad(), autocast:
            counts = self._count(model, self._dealt(shares), StopRequest(self.world, asked) if asked else None)
        return self._sum_up(*counts, started)

    def _dealt(self, shares: Sequence[int]) -> list[list[int]]:
        """Numbers of the blocks that each process computes."""
        if self._together:
            return [list(range(len(self.blocks)))] * self.world.size
        # Where all call the network equally often, a slow process's calls are the more, the more others have.
        turns = not shares or (self._network is not None and self._network.collective_forward)
        return dealt_blocks(len(self.blocks), (1,) * self.world.size if turns else shares)

    def _count(
        self, model: nn.Module, dealt: list[list[int]], request: StopRequest | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of this process's samples: true and guessed class [2, length]; top-5 hits and samples; sums [k, blocks].

        The first sums are the losses, the others what metrics of the user's own add up.
        """
        device = self.world.device
        pairs = torch.zeros(2, self.length, dtype=torch.int64, device=device)
        tallies = torch.zeros(2, dtype=torch.int64, device=device)
        width = self._own.width if self._own else 0
        sums = torch.zeros(1 + width, len(self.blocks), dtype=self._precise, device=device)
        mine, common = dealt[self.world.rank], min(map(len, dealt))
        # Each asks as often as whoever has the fewest blocks, and as far on in its own, so that nobody waits for that.
        asks = {len(mine) * turn // common: turn for turn in range(common)}
        for place, (number, counted, batch) in enumerate(self._batches(mine, max(map(len, dealt)))):
            if request and place in asks:
                request.check_stop(asks[place])
            length, labels = len(self.blocks[number]), batch.labels
            filled = max(length, self._together.most_parts) if self._together else length
            if self._together:
                labels = self._together.gather_rows(labels, filled)[:length]
            logits = averaged(model, batch.images, self._views)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            if self._views > 1 and self._log_probabilities:
                logits = logits.log_softmax(1)
            if self._together:
                logits = self._together.gather_outputs(logits, filled)
            logits = logits[:length]
            if not counted:
                continue
            guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
            block = self.blocks[number]
            pairs[:, block.start : block.stop] = torch.stack([labels, guesses[:, 0]])
            tallies += torch.stack([(guesses == labels[:, None]).any(1).sum(), labels.new_tensor(len(labels))])
            sums[0, number] = self._loss(logits, labels)
            if self._own:
                sums[1:, number] = self._own.of(logits, labels)
        return pairs, tallies, sums

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        function = F.nll_loss if self._log_probabilities else F.cross_entropy
        return function(logits.to(self._precise), labels, reduction="sum")

    def _batches(self, numbers: list[int], rounds: int) -> Iterator[tuple[int, bool, Any]]:
        """This process's blocks; up to so many, which don't count, where all must call the network equally often."""
        if self._together:
            yield from self._shared_batches(self._together)
            return
        mine = [(number, True) for number in numbers]
        if self._network and self._network.collective_forward:
            mine += [(0, False)] * (rounds - len(mine))
        requests = (torch.arange(self.blocks[number].start, self.blocks[number].stop) for number, _ in mine)
        for (number, counted), batch in zip(mine, self.loader.batches(0, requests), strict=True):
            yield number, counted, batch

    def _shared_batches(self, network: ParallelNetwork) -> Iterator[tuple[int, bool, Any]]:
        """Every block, of which this process has the samples that the network's input gives it; rank 0 counts."""
        requests: list[Tensor] = []
        for block in self.blocks:
            # A block of fewer samples than some op shares out is filled up with its first one, which doesn't count.
            filled = [*block, *[block.start] * (network.most_parts - len(block))]
            cuts, place = bounds(len(filled), network.replicas(self.world.size)), network.replica(self.world.rank)
            requests.append(torch.tensor(filled[cuts[place] : cuts[place + 1]]))
        for number, batch in enumerate(self.loader.batches(0, iter(requests))):
            yield number, self.world.is_main, batch

    def _sum_up(self, pairs: Tensor, tallies: Tensor, sums: Tensor, started: float) -> Evaluation:
        if not self.world.alone:
            for tensor in (pairs, tallies, sums):
                dist.all_reduce(tensor)
        hits, count = tallies.tolist()
        if count != self.length:
            raise RunError(
                f"the evaluation counted {count} samples, but the split has {self.length}",
                "evaluation",
                ("check that all machines have the same data",),
            )
        labels, guesses = pairs.cpu()
        columns = max(self.classes, 1 + int(guesses.max()))
        codes, counts = (labels * columns + guesses).unique(return_counts=True)
        cells = torch.stack([codes // columns, codes % columns, counts], 1)
        return Evaluation(
            count=count,
            loss=float(sums[0].cpu().sum()) / count,
            top1=int(cells[cells[:, 0] == cells[:, 1], 2].sum()) / count,
            top5=hits / count,
            cells=cells,
            classes=columns,
            seconds=time.perf_counter() - started,
            metrics=self._own.figures(sums[1:].cpu().sum(1), count) if self._own else {},
        )


def averaged(model: nn.Module, pictures: Tensor, count: int) -> Tensor:
    """The mean output [n, classes] over `count` views (1, 2 or 6) of pictures [n, channels, height, width].

    Itself, its mirror image, both shifted by a pixel, with half of the weight: what Jordan 2024 (arXiv:2404.00498)
    evaluates with.

    Raises:
        UserError: of what is no picture there is one view alone.
    """
    if count == 1:
        return main_and_auxiliary(model(pictures))[0]
    if pictures.ndim != 4 or min(pictures.shape[2:]) < 2:
        shape = "x".join(map(str, pictures.shape[1:]))
        raise UserError(f"samples of shape {shape} can't be mirrored", "train.evaluate_views", ("set the option to 1",))
    outputs = [(weight, main_and_auxiliary(model(view))[0]) for weight, view in _views(pictures, count)]
    precise = torch.promote_types(outputs[0][1].dtype, torch.float32)
    return torch.stack([weight * output.to(precise) for weight, output in outputs]).sum(0)


def _views(pictures: Tensor, count: int) -> Iterator[tuple[float, Tensor]]:
    """Weights, which add up to 1, and views."""
    height, width = pictures.shape[2:]
    wide = F.pad(pictures, (1, 1, 1, 1), "reflect")
    shifted = [wide[:, :, by : by + height, by : by + width] for by in (0, 2)] if count == 6 else []
    for number, view in enumerate([pictures, *shifted]):
        weight = 0.125 if number else 0.25 if shifted else 0.5
        yield weight, view
        yield weight, view.flip(3)
