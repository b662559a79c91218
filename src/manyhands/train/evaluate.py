"""Evaluation that counts each sample exactly once, with bit-identical results for any number of processes.

The split is divided into blocks of fixed size, which are assigned to processes in proportion to their shares of an
update. A block's result does not depend on the process, counts are integers, and losses are added in block order.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from manyhands.checkpoint import files
from manyhands.config.job import Job
from manyhands.core.errors import RunError, UserError
from manyhands.core.files import read_object
from manyhands.core.phases import CLOCK, EVALUATION
from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.run_folder import NOWHERE
from manyhands.core.stops import StopSignal
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.order import assign_blocks
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.group.plain import broadcast_plain
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.replicas.norm_pass import precise_dtype
from manyhands.train.loss import CustomMetric, Evaluation, MetricSums
from manyhands.train.optimize import CustomScheduler
from manyhands.train.state import find_resumable, restore_state
from manyhands.train.trainer import Trainer

ASK_S, MOST_BLOCKS = 1.0, 1000  # approximate seconds, and the most blocks, between two checks for a stop
BEST, LAST = "test-best", "test-last"  # the names of the records of the held-out test


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """Raised on all processes if a stop is requested during an evaluation."""


class StopRequest:
    """Stops all processes at the same block of an evaluation if `stop_requested` returns True on any process."""

    def __init__(self, world: World, stop_requested: Callable[[], object]) -> None:
        self._world, self._asked = world, stop_requested
        self._last, self._next, self._since = 0, 0, time.perf_counter()

    def check_stop(self, done: int) -> None:
        """Raises Interrupted on all processes if any of them should stop. A collective, about once a second.

        `done`: number of finished blocks. All processes must call this equally often, at equal fractions of their work.
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
        # Accelerators receive the first blocks long before they finish them, so the interval grows slowly.
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


@dataclass
class Evaluator:
    """Evaluates a network on the `length` samples of a split.

    The network may have more outputs than `classes`; the further outputs count as wrong predictions. The job sets the
    samples per block, the number of views per picture (test-time augmentation), and the loss: with train.loss "nll",
    the network returns log-probabilities.
    """

    loader: Loader
    length: int
    classes: int
    job: Job
    world: World
    network: ParallelNetwork
    metrics: Sequence[CustomMetric]

    def __post_init__(self) -> None:
        options, device = self.job.train, self.world.device
        self._views, self._log_probabilities = options.evaluate_views, options.loss == "nll"
        starts = range(0, self.length, options.evaluate_batch)
        self.blocks = [range(start, min(start + starts.step, self.length)) for start in starts]
        self._precise = precise_dtype(device)
        self._custom = MetricSums(self.metrics, self.classes, device, self._precise) if self.metrics else None

    def __call__(
        self,
        autocast: contextlib.AbstractContextManager[object],
        stop_requested: Callable[[], object] | None = None,
        shares: Sequence[int] = (),
    ) -> Evaluation:
        """Evaluates all samples and restores the network's mode. A collective.

        If `stop_requested` returns True on any process, all processes raise Interrupted. Either all or no processes
        must pass it. Blocks are assigned in proportion to `shares`, the samples of each process in an update (empty:
        equally). Raises RunError if the number of counted samples is not that of the split.
        """
        started = time.perf_counter()
        # If all processes must call the network equally often, unequal shares would only add calls.
        turns = not shares or self.network.share.collective_forward
        blocks_by_rank = assign_blocks(len(self.blocks), (1,) * self.world.size if turns else shares)
        if self.network.share.together:
            blocks_by_rank = [list(range(len(self.blocks)))] * self.world.size
        # Under inference_mode, the tensors that a sharded network creates in its first pass couldn't be trained.
        with evaluating(self.network.call), torch.no_grad(), autocast:
            counts = self._tally(blocks_by_rank, StopRequest(self.world, stop_requested) if stop_requested else None)
        return self._make_evaluation(*counts, started)

    def _tally(self, blocks_by_rank: list[list[int]], request: StopRequest | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns labels and predictions [2, length], top-5 hits and samples [2], loss and metric sums [k, blocks]."""
        device, width = self.world.device, 1 + (self._custom.width if self._custom else 0)
        pairs = torch.zeros(2, self.length, dtype=torch.int64, device=device)
        tallies = torch.zeros(2, dtype=torch.int64, device=device)
        sums = torch.zeros(width, len(self.blocks), dtype=self._precise, device=device)
        mine, common = blocks_by_rank[self.world.rank], min(map(len, blocks_by_rank))
        # All processes check equally often, at the same fractions of their blocks, so that none waits long.
        asks = {len(mine) * turn // common: turn for turn in range(common)}
        for place, (number, counted, batch) in enumerate(self._batches(mine, max(map(len, blocks_by_rank)))):
            if request and place in asks:
                request.check_stop(asks[place])
            block = self.blocks[number]
            logits, labels = self.network.evaluate(batch.images, batch.labels, len(block), self._average_logits)
            if not counted:
                continue
            guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
            pairs[:, block.start : block.stop] = torch.stack([labels, guesses[:, 0]])
            tallies += torch.stack([(guesses == labels[:, None]).any(1).sum(), labels.new_tensor(len(labels))])
            loss = F.nll_loss if self._log_probabilities else F.cross_entropy
            sums[0, number] = loss(logits.to(self._precise), labels, reduction="sum")
            if self._custom:
                sums[1:, number] = self._custom.batch_sums(logits, labels)
        return pairs, tallies, sums

    def _average_logits(self, model: nn.Module, images: Tensor) -> Tensor:
        logits = view_average(model, images, self._views)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(1) if self._views > 1 and self._log_probabilities else logits

    def _batches(self, blocks: list[int], rounds: int) -> Iterator[tuple[int, bool, Any]]:
        """Yields a tuple for each of this process's `blocks`: the block's index, True if it counts, and the samples.

        If all processes must call the network equally often, uncounted blocks fill up to `rounds`. On a mesh, every
        process yields every block, with the samples that its shard of the network reads, and only rank 0 counts.
        """
        share, mine = self.network.share, [(number, True) for number in blocks]
        if share.together:
            mine = [(number, self.world.is_main) for number in blocks]
        elif share.collective_forward:
            mine += [(0, False)] * (rounds - len(mine))
        ranges = (self.blocks[number] for number, _ in mine)
        requests = (torch.tensor(share.sample_indices(one) if share.together else one) for one in ranges)
        for (number, counted), batch in zip(mine, self.loader.batches(0, requests), strict=True):
            yield number, counted, batch

    def _make_evaluation(self, pairs: Tensor, tallies: Tensor, sums: Tensor, started: float) -> Evaluation:
        if not self.world.alone:
            for tensor in (pairs, tallies, sums):
                dist.all_reduce(tensor)
        hits, count = tallies.tolist()
        if count != self.length:
            what = f"the evaluation counted {count} samples, but the split has {self.length}"
            raise RunError(what, "evaluation", ("check that all machines have the same data",))
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
            metrics=self._custom.compute_values(sums[1:].cpu().sum(1), count) if self._custom else {},
        )


def view_average(model: nn.Module, pictures: Tensor, count: int) -> Tensor:
    """Returns the mean output [n, classes] over `count` views (1, 2 or 6) of pictures [n, channels, height, width].

    The views are the picture, its mirror image and, with half the weight, both shifted by one pixel, as in Jordan 2024
    (arXiv:2404.00498).
    """
    if count == 1:
        return main_and_auxiliary(model(pictures))[0]
    if pictures.ndim != 4 or min(pictures.shape[2:]) < 2:
        what = f"samples of shape {'x'.join(map(str, pictures.shape[1:]))} can't be mirrored"
        raise UserError(what, "train.evaluate_views", ("set train.evaluate_views to 1",))
    height, width = pictures.shape[2:]
    wide, views = F.pad(pictures, (1, 1, 1, 1), "reflect"), [(0.25 if count == 6 else 0.5, pictures)]
    if count == 6:
        views += [(0.125, wide[:, :, by : by + height, by : by + width]) for by in (0, 2)]
    outputs = [(weight, main_and_auxiliary(model(each))[0]) for weight, view in views for each in (view, view.flip(3))]
    precise = torch.promote_types(outputs[0][1].dtype, torch.float32)
    return torch.stack([weight * output.to(precise) for weight, output in outputs]).sum(0)


@CLOCK.in_phase(EVALUATION)
def evaluate_and_record(trainer: Trainer, stop: StopSignal) -> bool:
    """Evaluates and records the result. Returns True if it is the best so far. A collective. Raises Interrupted."""
    trainer.progress.owed = True
    with trainer.paused("evaluate"):
        with synchronized(trainer):
            found = trainer.evaluate(lambda: trainer.heartbeats.record_progress() or stop)
        return record_evaluation(trainer, found)


@contextlib.contextmanager
def synchronized(trainer: Trainer) -> Iterator[None]:
    """Replaces parameters and buffers by their averages over processes, within the context. A collective."""
    trainer.synchronizer.average_buffers(trainer.progress.step)
    with trainer.synchronizer.averaged():
        yield


def record_evaluation(trainer: Trainer, found: Evaluation) -> bool:
    """Records an evaluation in the run folder and in `progress`. Returns True if it is the best so far."""
    progress = trainer.progress
    progress.evaluated_step, progress.owed = progress.step, False
    by = trainer.job.train.best
    # Accuracies of a network with NaN outputs are meaningless.
    best = not math.isnan(found.loss) and progress.record_if_best(by, found.figure(by.partition(" ")[2]))
    if isinstance(trainer.updater.set_rates, CustomScheduler) and trainer.due.evaluation_requested():
        trainer.updater.set_rates.step_with_loss(found.loss)
    about = {"best": best, "classes": len(trainer.trained.classes)}
    trainer.observed.evaluated = EvaluationMetrics(**_named_figures(found, trainer) | about)
    trainer.journal.metrics(trainer.observed.evaluated)
    detail = evaluation_detail(found, trainer)
    for name in ("last", "best") if best else ("last",):
        trainer.journal.write_detail(name, detail)
    return best


def _named_figures(found: Evaluation, trainer: Trainer) -> dict[str, Any]:
    return {**vars(found), "time": time.time(), "epoch": trainer.progress.epoch, "step": trainer.progress.step}


def evaluation_detail(found: Evaluation, trainer: Trainer) -> EvaluationDetail:
    about = {"classes": list(trainer.trained.classes), "confusion": found.cells.tolist()}
    return EvaluationDetail(**_named_figures(found, trainer) | about)


@CLOCK.in_phase(EVALUATION)
def test_on_held_out(trainer: Trainer, stop: StopSignal) -> None:
    """Evaluates the last and the best weights on the held-out samples, unless already done. A collective.

    The network has the last weights afterwards, also if Interrupted is raised.
    """
    progress, folder = trainer.progress, trainer.folder.evaluations
    steps = {BEST: progress.best_step, LAST: progress.step}
    done = all((read_object(folder / f"{name}.json") or {}).get("step") == step for name, step in steps.items())
    if trainer.test is None or broadcast_plain(done, trainer.world):
        return
    with trainer.paused("evaluate"):
        with trainer.synchronizer.averaged():
            last = evaluation_detail(trainer.test(lambda: stop), trainer)
        best = _test_best_weights(trainer, last, stop)
    trainer.journal.write_detail(LAST, last)
    message = f"test on {last.count:,} held-out samples: top-1 "
    if best:
        trainer.journal.write_detail(BEST, best)
        message += f"{percentage(best.top1, 2)}% with the best weights (step {best.step}), "
    message += f"{percentage(last.top1, 2)}% with the last weights"
    top1 = {"best": best.top1 if best else None, "last": last.top1}
    trainer.journal.event("tested", message, progress.step, **top1)


def _test_best_weights(trainer: Trainer, last: EvaluationDetail, stop: StopSignal) -> EvaluationDetail | None:
    """Evaluates the best checkpoint on the held-out samples. Returns None if it can't be read. A collective."""
    progress, folder = trainer.progress, trainer.folder.checkpoints
    if progress.best_step == progress.step:
        return last
    intact = False
    with contextlib.suppress(UserError):  # hashes all files, even if this process wrote them
        for step in (progress.best_step, progress.step):
            files.verify_checkpoint(folder / files.step_name(step))
        intact = True
    if progress.best_step < 0 or not broadcast_plain(intact, trainer.world):
        step = progress.step
        trainer.journal.event("warning", "the best checkpoint can't be read; the test uses the last weights", step)
        return None
    assert trainer.test is not None
    epoch = _load_weights(trainer, progress.best_step)
    try:
        found = evaluation_detail(trainer.test(lambda: stop), trainer)
    except Interrupted:
        _load_weights(trainer, progress.step)  # the last weights are saved next
        raise
    _load_weights(trainer, progress.step)
    return found.model_copy(update={"step": progress.best_step, "epoch": epoch})


def _load_weights(trainer: Trainer, step: int) -> int:
    """Loads the weights of the checkpoint of a step. Returns the epoch of that checkpoint. A collective."""
    path, in_pieces = trainer.folder.checkpoints / files.step_name(step), bool(trainer.network.layouts)
    found = find_resumable(str(path), NOWHERE, trainer.world, in_pieces=in_pieces)
    assert found is not None  # `find_resumable` reads a path or raises
    return restore_state(found, trainer.network, None)[0].epoch
