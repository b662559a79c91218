"""Evaluation: each sample exactly once on any number of processes.

The split is cut into blocks of fixed size, and whole blocks are dealt out, so that each block is computed the same way
wherever it lands. Counts are integers, and each block's loss is added in the order of the blocks: the result is the
same to the last bit for any number of processes.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.core.errors import RunError
from manyhands.core.layouts import bounds
from manyhands.core.world import World
from manyhands.data.loader import Loader
from manyhands.data.order import evaluation_blocks
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.network import Cutting


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        count: samples evaluated, the length of the split.
        loss: mean cross-entropy (or mean negative log-likelihood).
        top1: share of samples whose first guess is right.
        top5: share of samples whose label is among the first five guesses.
        cells: int64 [cells, 3]: true class, guessed class, samples; of the confusion matrix where it isn't zero.
        classes: rows and columns of that matrix: the classes, and outputs beyond them up to the last that was guessed.
        seconds: how long it took.
    """

    count: int
    loss: float
    top1: float
    top5: float
    cells: Tensor
    classes: int
    seconds: float

    @property
    def confusion(self) -> Tensor:
        """The confusion matrix, int64 [classes, classes], rows are true classes."""
        matrix = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix


class Evaluator:
    """Evaluates a network on the test split.

    Args:
        loader: of the test split.
        length: samples in the split.
        classes: how many there are; the network may have more outputs, and a guess beyond is a wrong one.
        block: samples in a block.
        world: who takes part.
        log_probabilities: True when the network's output is log-probabilities (train.loss = "nll").
        collective_forward: True when all processes must call the network equally often.
        cutting: how the network is cut, where all processes compute each block together.
    """

    def __init__(  # noqa: PLR0913 - what decides an evaluation
        self,
        loader: Loader,
        length: int,
        classes: int,
        block: int,
        world: World,
        *,
        log_probabilities: bool = False,
        collective_forward: bool = False,
        cutting: Cutting | None = None,
    ) -> None:
        self.loader, self.length, self.classes, self.world = loader, length, classes, world
        self.blocks = evaluation_blocks(length, block)
        self._log_probabilities, self._collective, self._cutting = log_probabilities, collective_forward, cutting
        # Apple's devices know no float64.
        self._precise = torch.float32 if world.device == "mps" else torch.float64

    def __call__(self, model: nn.Module, autocast: contextlib.AbstractContextManager[object]) -> Evaluation:
        """Evaluates; the network is left in the mode it was in.

        Raises:
            RunError: the samples counted are not exactly those of the split.
        """
        started = time.perf_counter()
        training = model.training
        model.eval()
        try:
            with torch.inference_mode(), autocast:
                counts = self._count(model)
        finally:
            model.train(training)
        return self._sum_up(*counts, started)

    def _count(self, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Of this process's samples: true and guessed class [2, length]; top-5 hits and samples; block losses."""
        device = self.world.device
        pairs = torch.zeros(2, self.length, dtype=torch.int64, device=device)
        tallies = torch.zeros(2, dtype=torch.int64, device=device)
        losses = torch.zeros(len(self.blocks), dtype=self._precise, device=device)
        for number, counted, batch in self._batches():
            images, labels = self._whole(batch, number) if self._cutting else (batch.images, batch.labels)
            logits = main_and_auxiliary(model(images))[0].float()
            if self._cutting and not self._cutting.whole_outputs:
                count = max(len(self.blocks[number]), self._cutting.most_parts)
                logits = self._cutting.gather_rows(logits, count)
            logits = logits[: len(self.blocks[number])]
            if not counted:
                continue
            guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
            block = self.blocks[number]
            pairs[:, block.start : block.stop] = torch.stack([labels, guesses[:, 0]])
            tallies += torch.stack([(guesses == labels[:, None]).any(1).sum(), labels.new_tensor(len(labels))])
            losses[number] = self._loss(logits, labels)
        return pairs, tallies, losses

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        function = F.nll_loss if self._log_probabilities else F.cross_entropy
        return function(logits.to(self._precise), labels, reduction="sum")

    def _batches(self) -> Iterator[tuple[int, bool, Any]]:
        """This process's blocks; with repeated ones that don't count where all must call the network equally often."""
        if self._cutting:
            yield from self._shared_batches(self._cutting)
            return
        mine = [(number, True) for number in range(self.world.rank, len(self.blocks), self.world.size)]
        if self._collective:
            rounds = -(-len(self.blocks) // self.world.size)
            mine += [(0, False)] * (rounds - len(mine))
        requests = (torch.arange(self.blocks[number].start, self.blocks[number].stop) for number, _ in mine)
        for (number, counted), batch in zip(mine, self.loader.batches(0, requests), strict=True):
            yield number, counted, batch

    def _shared_batches(self, cutting: Cutting) -> Iterator[tuple[int, bool, Any]]:
        """Every block, of which this process has the samples that the network's input gives it; rank 0 counts."""
        requests: list[Tensor] = []
        for block in self.blocks:
            # A block of fewer samples than some op shares out is filled up with its first one, which doesn't count.
            filled = [*block, *[block.start] * (cutting.most_parts - len(block))]
            cuts = bounds(len(filled), cutting.replicas)
            requests.append(torch.tensor(filled[cuts[cutting.replica] : cuts[cutting.replica + 1]]))
        for number, batch in enumerate(self.loader.batches(0, iter(requests))):
            yield number, self.world.speaks, batch

    def _whole(self, batch: Any, number: int) -> tuple[Tensor, Tensor]:
        """This process's pictures of a block, and all of its labels."""
        cutting: Any = self._cutting
        count = max(len(self.blocks[number]), cutting.most_parts)
        return batch.images, cutting.gather_rows(batch.labels, count)[: len(self.blocks[number])]

    def _sum_up(self, pairs: Tensor, tallies: Tensor, losses: Tensor, started: float) -> Evaluation:
        if not self.world.alone:
            for tensor in (pairs, tallies, losses):
                dist.all_reduce(tensor)
        hits, count = tallies.tolist()
        if count != self.length:
            raise RunError(
                f"the evaluation counted {count} samples, and the split has {self.length}",
                "evaluation",
                ("do all processes see the same data? compare the folders on each machine",),
            )
        labels, guesses = pairs.cpu()
        columns = max(self.classes, 1 + int(guesses.max()))
        codes, counts = (labels * columns + guesses).unique(return_counts=True)
        cells = torch.stack([codes // columns, codes % columns, counts], 1)
        return Evaluation(
            count=count,
            loss=float(losses.cpu().sum()) / count,
            top1=int(cells[cells[:, 0] == cells[:, 1], 2].sum()) / count,
            top5=hits / count,
            cells=cells,
            classes=columns,
            seconds=time.perf_counter() - started,
        )
