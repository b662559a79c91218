"""Sessions: custom training loops on several processes, with collectives and the same updates as `fit`.

Under plain `python`, a session is one process. Under torchrun, or with the option cluster.init, it joins others.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from manyhands.checkpoint.trained import TrainedOn, recorded_trained_on
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_SAVED, UserError
from manyhands.core.phases import CLOCK, EVALUATION
from manyhands.core.run_folder import RunFolder
from manyhands.core.stops import StopSignal
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.data.open import resolve_pixels
from manyhands.data.options import DataOptions
from manyhands.data.samples import has_targets, splits_to_evaluate
from manyhands.data.splits import ImagesInMemory, check_labels
from manyhands.models.interface import main_and_auxiliary
from manyhands.parallel.gradients import autocast
from manyhands.parallel.group.collectives import Subgroup, new_group
from manyhands.parallel.network import ParallelNetwork
from manyhands.parallel.plan import PlanLike, to_plan
from manyhands.parallel.replicas.norm_pass import precise_dtype
from manyhands.train import custom_update
from manyhands.train.data_setup import first_picture, make_loader
from manyhands.train.evaluate import Evaluator, evaluating, record_evaluation, synchronized
from manyhands.train.loop import updates
from manyhands.train.loss import Evaluation, make_metrics
from manyhands.train.objects import metric_names
from manyhands.train.optimize import scheduler_state
from manyhands.train.parts import PICTURES, CustomParts, pixels_of
from manyhands.train.saving import finish_save, save, save_last
from manyhands.train.trainer import Trainer, record_time


class Session(Subgroup):
    """One process of a custom training loop, created by `manyhands.session()`.

    Attributes:
        world: rank, size, device and backend of this process.
        job: the resolved options.
        device: the device of this process.
        is_main: True on rank 0.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        folder: RunFolder | None = None,
        *,
        scheduled: bool = False,
        metrics: Mapping[str, Any] | None = None,
        stop: StopSignal | None = None,
        write_metadata: Callable[[Trainer], None] = lambda _: None,
    ) -> None:
        everybody = Subgroup(range(world.size), world.rank, None)
        super().__init__(everybody.ranks, everybody.rank, None)
        self.world, self.job, self.device, self.is_main = world, job, torch.device(world.device), world.is_main
        self._folder, self._scheduled, self._metrics = folder, scheduled, metrics or {}
        self._stop = StopSignal() if stop is None else stop
        self._write_metadata = write_metadata
        self._trainer: Trainer | None = None
        self._scheduler: LRScheduler | None = None
        self._own: custom_update.CustomUpdate | None = None
        self._hook: RemovableHandle | None = None
        # Completed epochs; True within an epoch; True if the code after a saved epoch must still run; changed data.
        self._concluded, self._begun, self._owed, self._changed = 0, False, False, list[str]()
        # The loop's last update, -1 if unknown; the last update after which all processes had the same network.
        self._last_step, self._together_at = -1, 0
        self._loss: list[Tensor] = []

    def new_group(self, ranks: list[int]) -> Subgroup:
        """Creates a subgroup. All processes must create the same groups in the same order."""
        return new_group(self.world, ranks)

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_set: Any,
        *,
        batch: int,
        plan: PlanLike | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, custom_update.SessionSamples]:
        """Prepares the model, optimizer and data for all processes, and resumes from the run folder if there is one.

        Args:
            model: a module on the CPU or on this process's device. All processes get rank 0's weights.
            optimizer: an optimizer of the model's parameters.
            train_set: a torch Dataset of (x, y).
            batch: the global batch size: samples per update over all processes.
            plan: how to shard the model: the result of `find_plan`, the path of a plan.json, or a dict. For example,
                {"mesh": "dp=2,tp=2", "fc": "n@dp o@tp"} shards the samples of op fc over the axis dp and its output
                features over tp.
            scheduler: a scheduler of this optimizer. Checkpoints include its state.

        Returns:
            The model, the optimizer, and an iterable of this process's micro-batches (x, y), reshuffled each epoch.
            `optimizer.step` and `scheduler.step` take effect only after the last micro-batch of an update, and
            `zero_grad` only between two updates.

        Raises:
            UserError: the arguments contradict each other or the job's options, or the run folder contains another run.
        """
        if self._folder and self._trainer:
            hints = ("open a new session with another out=… for each training run",)
            what = "prepare was called twice, but a run folder is for one training run"
            raise UserError(what, "session.prepare", hints)
        if scheduler and self._scheduled:
            hints = ("remove schedule= or scheduler=",)
            raise UserError("both session(schedule=…) and scheduler=… set the learning rate", "session.prepare", hints)
        self.close()
        job = self.job.model_copy(update={"train": self.job.train.model_copy(update={"batch": batch})})
        split = None if plan is None else to_plan(plan)
        if isinstance(optimizer, custom_update.PreparedOptimizer):
            optimizer = optimizer.__dict__["_inner"]
        own = CustomParts(model, optimizer, train_set, split, scheduler, self._scheduled)
        trainer, saved = custom_update.prepare_trainer(job, self._folder, self.world, own)
        self._trainer, self._scheduler, self._loss = trainer, scheduler, self._saved_losses(saved)
        self._concluded, self._changed = int(saved.get("epochs", 0)), saved.get("changed", [])
        self._owed, self._begun = trainer.progress.epoch > self._concluded, False
        self._last_step, self._together_at = -1, trainer.progress.step
        trainer.hooks.extra_state = self._checkpoint_entry
        if self._folder:
            hook = custom_update.OutputHook(lambda output: self._own.store_output(output) if self._own else None)
            self._hook = trainer.network.call.register_forward_hook(hook)
            self._write_metadata(trainer)
        if scheduler:
            scheduler_state(scheduler)  # refused before anything is trained
            custom_update.postpone_steps(scheduler, lambda: self._own is not None and not self._own.at_last)
        finish = functools.partial(self._finish_update, trainer)
        prepared = custom_update.PreparedOptimizer(optimizer, finish, self._has_unfinished_update)
        return trainer.network.call, prepared, custom_update.SessionSamples(self.batches, trainer.feed.order)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs, from 0 for a new run. Saves a checkpoint after each epoch.

        Raises:
            UserError: the run is complete, and the network or the data have changed since.
        """
        trainer = self._prepared_trainer()
        trainer.due.total_steps = self._last_step = count * trainer.feed.order.steps_per_epoch
        if self._concluded >= count and self._changed:
            what = f"the {self._concluded} epochs of this run are complete, but {self._changed[0]} changed"
            hints = (f"train longer: session.epochs({2 * self._concluded})", "or start another run: session(out=…)")
            raise UserError(what, str(trainer.folder.path), hints)
        while self._concluded < count:
            epoch = self._concluded
            yield epoch
            if trainer.progress.epoch == epoch:  # the loop left the epoch before its end
                trainer.progress.end_epoch()
            self._save_epoch()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the remaining micro-batches of this process in the current epoch."""
        trainer = self._prepared_trainer()
        if self._owed:  # resumed at the end of an epoch, where only the loop's own code must run
            self._owed = False
            return
        if self._begun and trainer.progress.step_in_epoch:
            trainer.progress.end_epoch()
        self._save_epoch()
        self._begun = True
        for update in updates(trainer, self._stop):
            self._own = custom_update.CustomUpdate(trainer.updater, update, trainer.progress.step)
            try:
                yield from self._own.micro_batches()
            finally:
                self._own = None
            if trainer.progress.step == self._last_step:
                self._synchronize(trainer)
        if trainer.due.stopped:
            step = trainer.progress.step
            record_time(trainer)
            trainer.journal.event("stopped", f"saved at step {step}; start the same program again to resume", step)
            raise SystemExit(EXIT_SAVED)

    def backward(self, loss: Tensor, weight: Tensor | float | None = None) -> None:
        """Runs backward for a micro-batch's mean loss, weighted by the micro-batch's fraction of the global batch.

        Args:
            loss: the mean loss [].
            weight: the sum of the weights if `loss` is a weighted mean; None: the number of samples. Pass weights for
                all micro-batches or for none.
        """
        self._prepared_trainer()
        if loss.numel() != 1:
            what = f"the loss is a tensor of shape {list(loss.shape)}"
            raise UserError(what, "session.backward", ("pass the mean over samples: loss.mean()",))
        if self._own is None:
            raise UserError("session.backward was called outside the loop over samples", "session.backward")
        added, counts = self._own.take_loss(loss.reshape(()), weight)
        self._loss = [torch.stack([added.to(counts.dtype), counts]) + sum(self._loss)]

    def mean_loss(self) -> float:
        """Returns the mean loss over all processes since the last call (NaN if none). Call it on all processes."""
        loss, counts = self.all_reduce(self._loss_sums())
        self._loss = []
        return float(loss / counts)

    def print(self, *words: object) -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            print(*words, flush=True)  # noqa: T201 - the user's own words

    def save(self) -> None:
        """Saves the model, optimizer, scheduler and data position as a checkpoint in the run folder.

        Call it on all processes. Does nothing at the end of an epoch, because `epochs` saves there.

        Raises:
            UserError: the session has no run folder, or the update isn't finished.
        """
        trainer = self._prepared_trainer()
        if not self._folder:
            raise UserError("this session has no run folder", "session.save", ('open session(out="runs/mine")',))
        if self._has_unfinished_update():
            raise UserError("save was called within an update", "session.save", ("save after optimizer.step()",))
        if trainer.progress.step_in_epoch:
            save(trainer)
            finish_save(trainer)

    @CLOCK.in_phase(EVALUATION)
    def evaluate(
        self, model: nn.Module, test_set: Any, classes: int | None = None, metrics: Mapping[str, Any] | None = None
    ) -> Evaluation:
        """Evaluates a model on all processes, each sample once. Records the result for the model of `prepare`."""
        own = self._trainer
        trainer = own if own and model in (own.network.call, own.network.model) else None
        network = trainer.network if trainer else ParallelNetwork(model)
        precision = (trainer.job if trainer else self.job).train.precision
        outputs = classes or network.traits.class_count or self._count_outputs(network, test_set)
        words = dict.fromkeys((*self.job.train.metrics, *(metric_names(metrics) or ())))
        given = {**self._metrics, **(metrics if isinstance(metrics, Mapping) else {})}
        started = time.perf_counter()
        with contextlib.closing(self._test_loader(test_set, network.model, outputs)) as loader:
            custom = make_metrics(words, given)
            evaluator = Evaluator(loader, len(test_set), outputs, self.job, self.world, network, custom)
            shares = own.feed.sharing.shares if own else ()
            with synchronized(trainer) if trainer else contextlib.nullcontext():
                found = evaluator(autocast(precision, self.world.device), shares=shares)
        if trainer and self._folder:
            record_evaluation(trainer, found)
            trainer.status_round.exclude_time(time.perf_counter() - started)
        return found

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state dict with full, synchronized tensors on the CPU. Call it on all processes."""
        trainer = self._prepared_trainer()
        with synchronized(trainer):
            return trainer.network.full_state_dict()

    def finish(self) -> None:
        """Synchronizes the model and saves a checkpoint. Runs on all processes at the end of the `with` block.

        Raises RunError if the checkpoint can't be written.
        """
        trainer = self._trainer
        if not trainer or self._owed:
            return
        self._synchronize(trainer)
        if self._folder:
            self._save_epoch()
            finish_save(trainer)
            if trainer.progress.step != trainer.progress.saved_step:
                save_last(trainer)
            record_time(trainer)
            trainer.journal.event("finished", step=trainer.progress.step)

    def close(self) -> None:
        """Releases the resources of `prepare`. The model keeps its weights."""
        if self._hook:
            self._hook.remove()
        if self._trainer:
            self._trainer.saver.wait()
            self._trainer.resources.close()
        self._trainer = self._hook = None

    def _synchronize(self, trainer: Trainer) -> None:
        """Synchronizes the networks of all processes unless they are in sync. A collective."""
        if trainer.progress.step != self._together_at:
            self._together_at = trainer.progress.step
            trainer.synchronizer.finish(trainer.progress.step)

    def _test_loader(self, data: Any, model: nn.Module, classes: int = 0) -> Loader:
        """Creates a loader of test data. Raises UserError if a label is not below `classes`, unless that is 0."""
        if has_targets(data):
            hints = ("add up your own metric with session.all_reduce(sums)",)
            raise UserError("evaluate needs class indices, but y is not a whole number", "session.evaluate", hints)
        # The preprocessing of a network that was trained in this process, else that of the prepared network.
        trained = self._trainer.trained if self._trainer else None
        trained_on = recorded_trained_on(model) or (TrainedOn(trained.pictures, trained.classes) if trained else None)
        splits = splits_to_evaluate(data, trained_on.classes if trained_on else ())
        if classes and splits.train.labels is not None:
            check_labels(splits.train.labels, classes, "the data set")
        own, pixels = DataOptions(**{key: getattr(self.job.data, key) for key in PICTURES}), splits.pixels
        if not pixels.own and trained_on and not trained_on.pictures.own:
            pixels = pixels_of(trained_on.pictures)
        elif not pixels.own and isinstance(splits.test, ImagesInMemory) and not (own.mean and own.std):
            what = "the mean and standard deviation for normalizing the pictures are unknown"
            change = 'or set them: job=Job(data={"mean": [0.5], "std": [0.25]})'
            raise UserError(what, "evaluate", ("call manyhands.evaluate(run, test_set)", change))
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        train = self.job.train.model_copy(update={"precision": "fp64" if double else "fp32"})
        job, pixels = self.job.model_copy(update={"train": train}), resolve_pixels(own, pixels)
        return make_loader(job, splits.train, pixels, self.world, train=False, classes=classes)

    def _count_outputs(self, network: ParallelNetwork, data: Any) -> int:
        with contextlib.closing(self._test_loader(data, network.model)) as loader:
            images = first_picture(loader)[None]
        evaluated = network.call if network.share.together else network.model
        with evaluating(evaluated), torch.no_grad():
            return main_and_auxiliary(evaluated(images))[0].shape[1]

    def _prepared_trainer(self) -> Trainer:
        if self._trainer is None:
            raise UserError("session.prepare was not called", "session", ("call prepare before training",))
        return self._trainer

    def _has_unfinished_update(self) -> bool:
        return self._own is not None and not self._own.made

    def _finish_update(self, trainer: Trainer) -> None:
        if self._trainer not in (trainer, None):
            what = "session.prepare was called again after this optimizer was prepared"
            raise UserError(what, "optimizer.step", ("put several networks into one nn.Module",))
        if self._own is None:
            raise UserError("optimizer.step() was called outside the loop over samples", "optimizer.step")
        if self._own.finish():
            self._prepared_trainer().count_update()

    def _checkpoint_entry(self) -> dict[str, Any]:
        """Returns the session's entry in a checkpoint. A collective."""
        state = json.dumps(scheduler_state(self._scheduler)) if self._scheduler else ""
        losses = self.all_gather(self._loss_sums()).tolist()
        return {custom_update.SESSION: {"epochs": self._concluded, "scheduler": state, "losses": losses}}

    def _saved_losses(self, saved: dict[str, Any]) -> list[Tensor]:
        """Returns a list with this process's saved loss sums [2], if any. For another world size, rank 0 gets all."""
        losses = saved.get("losses", [])
        if len(losses) != self.size:
            losses = [[sum(column) for column in zip(*losses, strict=True)]] if self.is_main and losses else []
        mine = torch.tensor(losses[self.rank :][:1], dtype=precise_dtype(self.device), device=self.device)
        return [*mine]

    def _loss_sums(self) -> Tensor:
        return sum(self._loss, torch.zeros(2, device=self.device)).to(precise_dtype(self.device))

    def _save_epoch(self) -> None:
        """Saves a checkpoint once per epoch, after the user's code at the end of the epoch has run. A collective."""
        trainer = self._prepared_trainer()
        self._owed, self._begun = False, False
        if trainer.progress.epoch > self._concluded:
            self._concluded = trainer.progress.epoch
            if self._folder:
                save(trainer)
