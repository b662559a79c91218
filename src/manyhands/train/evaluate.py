"""Evaluation: each sample exactly once on any number of processes.

The split is divided into blocks of fixed size, and blocks are assigned to processes in proportion to their shares of an
update. Each block is computed alike on any process, counts are integers, and the losses of blocks are added in order:
the result is equal to the last bit for any number of processes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.checkpoint import files
from manyhands.checkpoint.files import verify
from manyhands.config.job import Job
from manyhands.core.errors import RunError, UserError
from manyhands.core.files import read_object
from manyhands.core.phases import CLOCK, EVALUATION
from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.run_folder import NOWHERE
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.order import dealt_blocks, evaluation_blocks
from manyhands.models.outputs import main_and_auxiliary
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.loss import CustomMetric, Evaluation, FigureSums
from manyhands.train.recover import Resumable, find_state
from manyhands.train.schedule import CustomScheduler
from manyhands.train.state import restore
from manyhands.train.stopping import StopSignal
from manyhands.train.trainer import Trainer

# Processes ask each other about so often whether to stop.
ASK_S, MOST_BLOCKS = 1.0, 1000
# Names of the records of the test on held-out samples.
BEST, LAST = "test-best", "test-last"


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """Raised if the run is asked to stop during an evaluation."""


class StopRequest:
    """Stops all processes at the same block of an evaluation if any of them was asked to stop.

    Args:
        world: the processes.
        asked: returns True if this process was asked to stop.
    """

    def __init__(self, world: World, asked: Callable[[], object]) -> None:
        self._world, self._asked = world, asked
        self._last, self._next, self._since = 0, 0, time.perf_counter()

    def check_stop(self, done: int) -> None:
        """Must be called before each block, after `done` blocks; a collective about once a second.

        All processes call it equally often; with different numbers of blocks, at the same fraction.

        Raises:
            Interrupted: a process was asked to stop; raised on all processes.
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
    """Puts a network into evaluation mode and restores the mode of each layer afterwards."""
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
        loader: loads the test split.
        length: the number of samples in the split.
        classes: the number of classes; the network may have more outputs, which count as wrong.
        job: supplies the number of samples in a block, the views of each picture, whose outputs are averaged, and the
            loss: the network's output is log-probabilities if train.loss is "nll".
        world: the processes.
        network: the network under its mode.
        metrics: custom metrics.
    """

    def __init__(
        self,
        loader: Loader,
        length: int,
        classes: int,
        job: Job,
        world: World,
        network: ParallelNetwork,
        metrics: Sequence[CustomMetric],
    ) -> None:
        self._views, self._log_probabilities = job.train.evaluate_views, job.train.loss == "nll"
        self.loader, self.length, self.classes, self.world = loader, length, classes, world
        self.blocks = evaluation_blocks(length, job.train.evaluate_batch)
        self._network = network
        # Apple's devices know no float64.
        self._precise = torch.float32 if world.device == "mps" else torch.float64
        self._own = FigureSums(metrics, classes, world.device, self._precise) if metrics else None

    def __call__(
        self,
        autocast: contextlib.AbstractContextManager[object],
        asked: Callable[[], object] | None = None,
        shares: Sequence[int] = (),
    ) -> Evaluation:
        """Evaluates; the network is left in the mode it was in.

        Args:
            autocast: the context of the forward passes.
            asked: returns True if this process was asked to stop; given on all processes, or on none.
            shares: each process's share of an update, in proportion to which blocks are assigned; empty if equal.

        Raises:
            RunError: the samples counted are not exactly those of the split.
            Interrupted: a process was asked to stop; raised on all processes.
        """
        started = time.perf_counter()
        # Not inference_mode: what a sharded network's first pass sets up under it could never be trained.
        with evaluating(self._network.call), torch.no_grad(), autocast:
            counts = self._count(self._dealt(shares), StopRequest(self.world, asked) if asked else None)
        return self._sum_up(*counts, started)

    def _dealt(self, shares: Sequence[int]) -> list[list[int]]:
        """Numbers of the blocks that each process computes."""
        if self._network.share.together:
            return [list(range(len(self.blocks)))] * self.world.size
        # Where all call the network equally often, a slow process's calls are the more, the more others have.
        turns = not shares or self._network.share.collective_forward
        return dealt_blocks(len(self.blocks), (1,) * self.world.size if turns else shares)

    def _count(self, dealt: list[list[int]], request: StopRequest | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns true and predicted class [2, length], top-5 hits and samples [2], and sums [k, blocks].

        The first sums are the losses, the others those of custom metrics.
        """
        device = self.world.device
        pairs = torch.zeros(2, self.length, dtype=torch.int64, device=device)
        tallies = torch.zeros(2, dtype=torch.int64, device=device)
        width = self._own.width if self._own else 0
        sums = torch.zeros(1 + width, len(self.blocks), dtype=self._precise, device=device)
        mine, common = dealt[self.world.rank], min(map(len, dealt))
        # All processes check equally often, at the same fractions of their blocks, so that none waits long.
        asks = {len(mine) * turn // common: turn for turn in range(common)}
        for place, (number, counted, batch) in enumerate(self._batches(mine, max(map(len, dealt)))):
            if request and place in asks:
                request.check_stop(asks[place])
            block = self.blocks[number]
            logits, labels = self._network.evaluate(batch.images, batch.labels, len(block), self._outputs)
            if not counted:
                continue
            guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
            pairs[:, block.start : block.stop] = torch.stack([labels, guesses[:, 0]])
            tallies += torch.stack([(guesses == labels[:, None]).any(1).sum(), labels.new_tensor(len(labels))])
            sums[0, number] = self._loss(logits, labels)
            if self._own:
                sums[1:, number] = self._own.of(logits, labels)
        return pairs, tallies, sums

    def _outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        logits = averaged(model, images, self._views)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(1) if self._views > 1 and self._log_probabilities else logits

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        function = F.nll_loss if self._log_probabilities else F.cross_entropy
        return function(logits.to(self._precise), labels, reduction="sum")

    def _batches(self, numbers: list[int], rounds: int) -> Iterator[tuple[int, bool, Any]]:
        """Yields this process's blocks: the number, whether it counts, and the samples.

        If all processes must call the network equally often, blocks that don't count fill up to `rounds`. On a mesh,
        each block has the samples that this process's part of the network reads, and rank 0 counts.
        """
        share, mine = self._network.share, [(number, True) for number in numbers]
        if share.together:
            mine = [(number, self.world.is_main) for number in numbers]
        elif share.collective_forward:
            mine += [(0, False)] * (rounds - len(mine))
        blocks = (self.blocks[number] for number, _ in mine)
        requests = (
            torch.tensor(share.of_block(one)) if share.together else torch.arange(one.start, one.stop) for one in blocks
        )
        for (number, counted), batch in zip(mine, self.loader.batches(0, requests), strict=True):
            yield number, counted, batch

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
    """Returns the mean output [n, classes] over `count` views (1, 2 or 6) of pictures [n, channels, height, width].

    The views are the picture, its mirror image, and both shifted by one pixel, with half the weight, as in Jordan 2024
    (arXiv:2404.00498).

    Raises:
        UserError: the samples are not pictures and have only one view.
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


@CLOCK.within(EVALUATION)
def evaluate(trainer: Trainer, stop: StopSignal) -> bool:
    """Evaluates on all processes and records the result; returns True if it is the best so far.

    Raises:
        Interrupted: all processes stop; the evaluation runs after the resume.
    """
    progress, started = trainer.progress, time.perf_counter()
    trainer.heartbeats.phase = "evaluate"
    progress.owed = True
    with agreed(trainer):
        found = trainer.evaluate(lambda: trainer.heartbeats.beat() or stop)
    best = record_evaluation(trainer, found)
    trainer.status_round.leave_out(time.perf_counter() - started)
    trainer.heartbeats.phase = "train"
    return best


@contextlib.contextmanager
def agreed(trainer: Trainer) -> Iterator[None]:
    """Replaces the parameters by the synchronized ones within the context; starts with a collective."""
    trainer.synchronizer.average_buffers(trainer.progress.step)
    with trainer.synchronizer.averaged():
        yield


def record_evaluation(trainer: Trainer, found: Evaluation) -> bool:
    """Records an evaluation of the current network; returns True if it is the best so far."""
    progress = trainer.progress
    progress.evaluated_step, progress.owed = progress.step, False
    by = trainer.job.train.best
    best = progress.improves(by, found.figure(by.partition(" ")[2]))
    if isinstance(trainer.update.set_rates, CustomScheduler) and trainer.due.evaluation_requested():
        trainer.update.set_rates.evaluated(found.loss)
    about = {"best": best, "classes": len(trainer.trained.classes), "seconds": found.seconds}
    trainer.observed.evaluated = EvaluationMetrics(**_figures(found, trainer), **about)
    trainer.journal.metrics(trainer.observed.evaluated)
    detail = describe(found, trainer)
    for name in ("last", "best") if best else ("last",):
        trainer.journal.detail(name, detail)
    return best


def _figures(found: Evaluation, trainer: Trainer) -> dict[str, Any]:
    """Returns the fields that both records of an evaluation have."""
    progress, names = trainer.progress, ("count", "loss", "top1", "top5", "metrics")
    place = {"time": time.time(), "epoch": progress.epoch, "step": progress.step}
    return place | {name: getattr(found, name) for name in names}


def describe(found: Evaluation, trainer: Trainer) -> EvaluationDetail:
    """Returns an evaluation as stored in the run folder."""
    confusion = [(row, column, count) for row, column, count in found.cells.tolist()]
    return EvaluationDetail(**_figures(found, trainer), classes=list(trainer.trained.classes), confusion=confusion)


@CLOCK.within(EVALUATION)
def test_once(trainer: Trainer, stop: StopSignal) -> None:
    """Evaluates the held-out samples, unless these weights were tested before; a collective.

    The network has the last weights before and afterwards, also after an exception.

    Raises:
        Interrupted: all processes stop; the test runs after the resume.
    """
    if trainer.test is None or not broadcast_plain(not _is_done(trainer), trainer.world):
        return
    trainer.heartbeats.phase = "evaluate"
    with trainer.synchronizer.averaged():
        last = describe(trainer.test(lambda: stop), trainer)
    best = _of_the_best(trainer, last, stop)
    trainer.journal.detail(LAST, last)
    message = f"test on {last.count:,} held-out samples: "
    of_last = percentage(last.top1, 2)
    if best:
        trainer.journal.detail(BEST, best)
        of_best = percentage(best.top1, 2)
        message += f"top-1 {of_best}% with the best weights (step {best.step}), {of_last}% with the last weights"
    else:
        message += f"top-1 {of_last}% with the last weights"
    step = trainer.progress.step
    trainer.journal.event("tested", message, step, best=best.top1 if best else None, last=last.top1)
    trainer.heartbeats.phase = "train"


def _is_done(trainer: Trainer) -> bool:
    """True if records of a test with the final weights exist."""
    wanted = {BEST: trainer.progress.best_step, LAST: trainer.progress.step}
    records = {name: trainer.folder.evaluations / f"{name}.json" for name in wanted}
    return all(
        file.is_file() and (read_object(file) or {}).get("step") == wanted[name] for name, file in records.items()
    )


def _of_the_best(trainer: Trainer, last: EvaluationDetail, stop: StopSignal) -> EvaluationDetail | None:
    """Tests the best weights, read from their checkpoint; None if the checkpoint can't be read."""
    progress, folder = trainer.progress, trainer.folder.checkpoints
    if progress.best_step == progress.step:
        return last
    paths = [folder / files.step_name(step) for step in (progress.best_step, progress.step)]
    if progress.best_step < 0 or not broadcast_plain(all(map(_is_sound, paths)), trainer.world):
        step = progress.step
        trainer.journal.event("warning", "the best checkpoint can't be read; the test uses the last weights", step)
        return None
    assert trainer.test is not None
    epoch = _load(trainer, progress.best_step)
    try:
        found = describe(trainer.test(lambda: stop), trainer)
    except Interrupted:
        _load(trainer, progress.step)  # what is saved next are the last weights
        raise
    _load(trainer, progress.step)
    return found.model_copy(update={"step": progress.best_step, "epoch": epoch})


def _is_sound(path: Path) -> bool:
    try:
        verify(path)
    except UserError:
        return False  # which is the answer
    return True


def _load(trainer: Trainer, step: int) -> int:
    """Gives the network the weights that were saved at a step; the epoch of that. A collective."""
    path = trainer.folder.checkpoints / files.step_name(step)
    found = find_checkpoint(path, trainer.job, trainer.world, in_pieces=bool(trainer.network.layouts))
    return restore(found.snapshot, trainer.network, None, where=str(path), source=found.source)[0].epoch


def find_checkpoint(path: Path, job: Job, world: World, *, in_pieces: bool) -> Resumable:
    """Returns the state of a checkpoint, as rank 0 reads it, on every process; see `find_state`."""
    options = job.checkpoint.model_copy(update={"resume": str(path)})
    named = job.model_copy(update={"checkpoint": options})
    found = find_state(named, NOWHERE, world, in_pieces=in_pieces)
    assert found is not None  # a path is read or refused
    return found
