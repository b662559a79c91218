"""The Python interface: fit, evaluate, load, predict and session; alone, under a launcher, or with processes=N.

What computes with tensors comes through `load_worker`.
"""

import contextlib
import copy
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.config.job import OBJECT, Job, TrainOptions
from manyhands.config.load import is_switch, known_keys, load_on
from manyhands.core.errors import EXIT_SAVED, ManyhandsError, UserError
from manyhands.core.folder import NOWHERE, RunFolder
from manyhands.core.going_on import OBJECTS
from manyhands.core.named_code import announce
from manyhands.core.plugins import did_you_mean
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.stops import RECEIVED
from manyhands.core.world import Membership
from manyhands.report.changes import refuse_changes
from manyhands.report.page import write_report
from manyhands.report.read import read_run
from manyhands.report.time_shares import samples_of_each
from manyhands.run.evaluate import resolve_checkpoint
from manyhands.run.load import load_worker
from manyhands.run.own_code import record_of
from manyhands.run.predict import list_pictures
from manyhands.run.session_block import SessionBlock
from manyhands.run.train import Outcome, place_of, report_on, run_folder, train, train_in_process
from manyhands.train.objects import Objects, digest_objects, metric_words

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.train.epoch_end import AtEpochEnd
    from manyhands.train.evaluate import Evaluation
    from manyhands.train.own_optimizer import MakeOptimizer
    from manyhands.train.session import Session
    from manyhands.train.trained import Trained

# What every function takes as `job`.
JobLike = Job | str | Path | None


@dataclass(frozen=True)
class Run:
    """A run that has ended, read from its folder.

    Attributes:
        path: the run folder.
        status: "finished"; a run that is stopped raises instead of being returned.
        model: the network, where `fit` was given an object.
    """

    path: Path
    status: str
    model: "nn.Module | None" = field(default=None, repr=False, compare=False)

    @property
    def evaluations(self) -> list[EvaluationMetrics]:
        """All evaluations, in order."""
        return read_run(self.path).evaluations

    @property
    def best(self) -> EvaluationMetrics:
        """The evaluation that is the best by what train.best says."""
        noted = [record for record in self._evaluated() if record.best]
        return noted[-1] if noted else max(self._evaluated(), key=lambda record: record.top1)

    @property
    def final(self) -> EvaluationMetrics:
        """The last evaluation."""
        return self._evaluated()[-1]

    @property
    def test(self) -> EvaluationDetail | None:
        """What the best weights made of samples that decided nothing; None where none were held out."""
        return read_run(self.path).tests.get("best")

    @property
    def shares(self) -> list[int]:
        """Samples of each update that each process took at last, by rank."""
        return samples_of_each(read_run(self.path))

    def report(self) -> Path:
        """Writes report.html and its pictures, and says where."""
        return write_report(self.path)

    def _evaluated(self) -> list[EvaluationMetrics]:
        found = self.evaluations
        if not found:
            raise UserError("this run has no evaluation yet", str(self.path))
        return found


# A flag in a hint, with its value: what follows it, unless that is a word of the sentence.
_FLAG = re.compile(
    r"""(?<![\w-])(?:
        --set\ (?P<quote>['"]?)(?P<key>[\w.]+)=(?P<set>.+?)(?P=quote)(?=[,;:)]?(?:\s|$))
        |-(?P<name>n|-[a-z][\w-]*(?:\.[\w-]+)?)
        (?:\ (?!(?:or|and|at|with|starts|to|that|is|for|of|out)\b)
            (?P<value>(?:an?|another)\ [^,;:()]+|[^\s,;()]*[^\s,;:.()]))?
    )""",
    re.VERBOSE,
)
# Flags whose names are not those of their options.
_OPTIONS = {"n": "processes", "sync": "sync.method", "parallel": "parallel.mode", "data_dir": "data.dir"}


def _as_arguments(line: str, bare: str = "=…") -> str:
    """A hint with the arguments of its flags, `bare` behind those without a value; command lines stay unchanged."""

    def argument(flag: re.Match[str]) -> str:
        key = (flag["key"] or flag["name"].removeprefix("-").replace("-", "_")).removeprefix("train.")
        if key not in {"out", *TrainOptions.model_fields} and "." not in key:
            key = _OPTIONS.get(key) or next((known for known in known_keys() if known.endswith(f".{key}")), key)
        name, value = key.replace(".", "__"), flag["set"] or flag["value"] or ""
        if bare and not flag["set"] and is_switch(key):
            return f"{name}=True {value}".rstrip()
        if value in {"true", "false"}:
            value = value.title()
        elif value and not re.match(r"[\d.\[\"]", value):
            value = f'"{value}"'
        return f"{name}={value}" if value else f"{name}{bare}"

    return line if "manyhands " in line else _FLAG.sub(argument, line)


@contextlib.contextmanager
def _hints_as_arguments() -> Iterator[None]:
    try:
        yield
    except ManyhandsError as error:
        error.where, error.mend = _as_arguments(error.where, ""), tuple(map(_as_arguments, error.mend))
        raise


@_hints_as_arguments()
def fit(  # noqa: PLR0913 - all but three are named
    model: "nn.Module | str | None" = None,
    train_set: Any = None,
    test_set: Any = None,
    *,
    job: JobLike = None,
    held_out_set: Any = None,
    processes: int | None = None,
    loss: "Callable[[Tensor, Tensor], Tensor] | str | None" = None,
    optimizer: "MakeOptimizer | str | None" = None,
    schedule: "Callable[..., Any] | str | None" = None,
    metrics: Mapping[str, Any] | Sequence[str] | None = None,
    at_epoch_end: "AtEpochEnd | None" = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Trains a classifier and returns its run; `model` holds the trained weights afterwards.

    Args:
        model: a network, or a name such as "resnet18"; None for the job's.
        train_set: a torch Dataset of (x, y), or a name or folder such as "cifar10"; None for the job's.
        test_set: the same, for evaluation; without it a tenth of train_set is kept for that. The best epoch is chosen
            by it.
        job: a Job or the path of a job.toml; what is given beside it wins over what it says.
        held_out_set: the same as test_set, for a test: evaluated once at the end, with the best and the last weights.
        processes: how many to start on this machine; None: as many as the job says, or this process, or the place
            that torchrun gave it.
        loss: function (output, labels) of the mean loss or one per sample; cross-entropy if None. Or what train.loss
            may be.
        optimizer: function of the list of parameters that gives a torch.optim.Optimizer, such as torch.optim.RMSprop;
            its learning rate is moved by the schedule. Or what train.optimizer may be.
        schedule: function of the update's number, from 0, that gives the part of the peak learning rate at it, or
            function of the optimizer (its first parameter has that name) that gives one of torch's schedulers. Either
            may ask for total_steps and steps_per_epoch by these names. Or what train.schedule may be.
        metrics: more figures of each evaluation, by name: functions (outputs [n, C], labels [n]) of one value per
            sample, or objects with update(outputs, labels), which gives sums, and compute(sums). Or what train.metrics
            may be.
        at_epoch_end: function (EpochEnd) that is called on rank 0 after each epoch and its evaluation, while the other
            processes wait; what it raises ends the run.
        out: the run folder.
        quiet: no progress on standard error.
        settings: options of the train section (epochs, batch, lr …), or of any section as section__name.

    Raises:
        ManyhandsError: the run failed, or an argument is wrong.
        KeyboardInterrupt: after Ctrl-C, once the run is saved.
        SystemExit: with code 75, after SIGTERM or another request to stop, once the run is saved.
    """
    if job is None and (model is None or train_set is None):
        what = "network" if model is None else "training set"
        raise UserError(f"fit has no {what}", "fit", ("fit(model, train_set)", "or a job that names both: fit(job=…)"))
    named = _options_of(model)
    if train_set is not None:
        named["data.name"] = str(train_set) if isinstance(train_set, str | Path) else OBJECTS
    given = {"run.out": str(out) if out else None, "cluster.processes": processes}
    own = {"optimizer": optimizer, "loss": loss, "schedule": schedule}
    for name, one in own.items():
        given[f"train.{name}"] = one if one is None or isinstance(one, str) else OBJECT
    given["train.metrics"] = metric_words(metrics)
    loaded = load_on(job, {**_flags(settings, "fit"), **named, **given})
    if at_epoch_end is not None and not callable(at_epoch_end):
        raise UserError("at_epoch_end is not a function", "fit", ("at_epoch_end=lambda end: print(end.epoch)",))
    if not (optimizer is None or isinstance(optimizer, str) or callable(optimizer)):
        mend = ("give what makes it of the parameters: optimizer=torch.optim.RMSprop",)
        raise UserError(f"the optimizer is a {type(optimizer).__name__}, not a function", "fit", mend)
    live: dict[str, Any] = {name: one for name, one in own.items() if not isinstance(one, str)}
    objects = Objects(None if isinstance(model, str) else model, at_epoch_end=at_epoch_end, **live)
    objects.metrics = metrics if isinstance(metrics, Mapping) else None
    if named.get("data.name") == OBJECTS:
        objects.train_set, objects.test_set = train_set, test_set
    _refuse_what_is_lost(named.get("data.name"), test_set, held_out_set)
    objects.held_out_set = held_out_set
    buffers: Any = getattr(loss, "buffers", tuple)
    objects.digests = digest_objects(**live, network=objects.model, loss_weights=tuple(buffers()))
    refuse_changes(
        loaded, digests=lambda: objects.digests | load_worker("own_process").digest_of_objects(loaded.job, objects)
    )
    started = processes if processes is not None else loaded.job.cluster.processes or None
    RECEIVED.clear()
    outcome, elsewhere = _start(loaded.job, objects, processes, started, quiet=quiet)
    if elsewhere and objects.model is not None:
        load_worker("own_process").load_weights(objects.model, outcome.folder.path)
    if outcome.status == "stopped":
        if signal.SIGINT in RECEIVED:
            raise KeyboardInterrupt(f"saved in {outcome.folder.path}; the same program resumes there")
        raise SystemExit(EXIT_SAVED)
    return Run(outcome.folder.path, outcome.status, objects.model)


def _options_of(model: Any) -> dict[str, Any]:
    """Options that follow from a network, as dotted keys. Raises UserError: it is none."""
    if model is None or isinstance(model, str):
        return {"model.name": model}
    if isinstance(model, type) or not hasattr(model, "named_parameters"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(
            f"model is {kind}, not a network", "model", ("give a torch.nn.Module, such as nn.Linear(64, 10)",)
        )
    # A float64 network is given its inputs unchanged, as in a session; one of several types keeps its types.
    double = {str(one.dtype) for one in model.parameters()} == {"torch.float64"}
    return {"model.name": type(model).__name__, **({"train.precision": "fp64"} if double else {})}


def _flags(settings: dict[str, Any], function: str) -> dict[str, Any]:
    """Keyword arguments of a function as dotted keys: epochs is train.epochs, data__workers is data.workers."""
    flags: dict[str, Any] = {}
    for name, value in settings.items():
        if "__" in name:
            flags[name.replace("__", ".", 1)] = value
        elif name in TrainOptions.model_fields:
            flags[f"train.{name}"] = value
        else:
            raise UserError(f"{function} has no argument {name}", function, _meant(name, value))
    return flags


def _meant(name: str, value: Any) -> tuple[str, ...]:
    if name == "workers":
        return (f"fit(processes={value}) starts processes", f"data__workers={value}: the loader's, of each process")
    known = next((key for key in known_keys() if key.endswith(f".{name}")), "")
    section = f"did you mean {known.replace('.', '__')}?" if known else "options of other sections: section__name"
    return (did_you_mean(name, TrainOptions.model_fields) or section,)


def _refuse_what_is_lost(name: str | None, test_set: Any, held_out_set: Any) -> None:
    """Raises UserError for a set that would be passed over, since the training set isn't an object."""
    if name == OBJECTS:
        return
    for word, given, mend in (
        ("test_set", test_set, "with a name: the data's own test split, or data__validation=0.1 for a share"),
        ("held_out_set", held_out_set, 'with a name: data__held_out="./folder"'),
    ):
        if given is not None:
            raise UserError(f"{word} goes with data sets as objects", word, (mend,))


def _start(job: Job, objects: Objects, asked: int | None, started: int | None, *, quiet: bool) -> tuple[Outcome, bool]:
    """Trains here, or in processes of its own, and says whether it was in those.

    Args:
        job: what to do.
        objects: what was brought instead of names.
        asked: processes that the caller wants to be started.
        started: the same, or what the job says.
        quiet: no progress on standard error.
    """
    standing = _standing("auto", "auto")
    if started is None or (standing and asked is None):
        return train_in_process(job, _place_of(job), quiet=quiet, objects=objects), False
    if standing:
        mend = ("leave processes out: the group's own train together", "or call it before the group is made")
        raise UserError("processes=N starts processes, and this process is in a group of some already", "fit", mend)
    # A launcher's place wins over the job's number of processes.
    elsewhere = place_of(job).membership is None
    return train(job, quiet=quiet, objects=objects), elsewhere


def _place_of(job: Job) -> Membership:
    """This process's place: in the group that it is in already, as a launcher gave it, or on its own."""
    return _standing(job.cluster.device, job.cluster.backend) or place_of(job).membership or _on_its_own(job)


def _standing(device: str, backend: str) -> Membership | None:
    """The place in a process group that the script has made already; who hasn't imported torch has made none."""
    if "torch.distributed" not in sys.modules:
        return None
    return load_worker("own_process").standing_membership(device, backend)


def _on_its_own(job: Job) -> Membership:
    return Membership(device=job.cluster.device, backend=job.cluster.backend)


@_hints_as_arguments()
def evaluate(
    model: "nn.Module | Run | str | Path",
    test_set: Any,
    *,
    batch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    job: JobLike = None,
) -> "Evaluation":
    """Evaluates a network on a data set in this process (or with the other processes of a launcher).

    8-bit pictures are normalized with the mean and deviation of the set that the network was trained on, which `fit`,
    `load` and `Session.prepare` note for the network. Float tensors are used unchanged.

    Args:
        model: the network; or what `fit` returned, a run folder, or a checkpoint, whose best weights are evaluated.
        test_set: a torch Dataset of (x, y).
        batch: samples in one pass; None for what the job says, or 256.
        metrics: more figures by name, as `fit` takes them.
        job: a Job or the path of a job.toml.

    Raises:
        UserError: a sample doesn't suit the network, its normalization is unknown, or an argument is wrong.
    """
    if isinstance(model, Run | str | Path):
        model = load(model).network
    _options_of(model)
    with session(job=job, evaluate_batch=batch) as here:
        return here.evaluate(model.to(here.device), test_set, metrics=metrics)


@_hints_as_arguments()
def load(
    run: Run | str | Path, which: str = "best", *, model: "nn.Module | str | None" = None, device: str = "cpu"
) -> "Trained":
    """The network that a run has trained, ready for use.

        network, transform, classes = manyhands.load("runs/pets")
        scores = network(transform("cat.jpg")[None])
        print(classes[scores.argmax()])

    Args:
        run: what `fit` returned, a run folder, or a checkpoint.
        which: "best" or "last", for a run.
        model: the network, where the run was given an object; it takes the weights. Or the name of one.
        device: torch's name of where the network is to be.

    Returns:
        A Trained, of three. network: in evaluation mode. transform: makes of a picture (a path, a PIL image, 8-bit
        pixels) what the network wants, [C, S, S]; numbers of a data set of one's own pass as they are. classes: a name
        for each output.

    Raises:
        UserError: there is no such run, or its network can't be made again without `model`.
    """
    live = copy.deepcopy(run.model) if isinstance(run, Run) and model is None else model
    path = resolve_checkpoint(_place(run), which)
    record = record_of(path)
    if live is None and record and not isinstance(run, Run):
        announce([record.name], path, record, "load(RUN, model={!r})")
    return load_worker("own_process").open_trained(path, model=live, device=device)


@_hints_as_arguments()
def predict(
    run: Run | str | Path, pictures: Any, *, which: str = "best", model: "nn.Module | str | None" = None
) -> list[list[tuple[str, float]]]:
    """The most likely classes of pictures: for each a list of (class name, probability).

    Args:
        run: what `fit` returned, a run folder, or a checkpoint.
        pictures: paths of files and folders, PIL images, 8-bit pixels, or tensors as the run's own data set gave them.
        which: "best" or "last", for a run.
        model: as `load` takes it.

    Raises:
        UserError: a picture can't be read, or how the run's own data set made its samples isn't known.
    """
    tensors = load_worker("own_process")
    if isinstance(pictures, str | Path) or not hasattr(pictures, "__iter__") or tensors.as_picture(pictures):
        pictures = [pictures]  # one picture, whose channels are none
    inputs = [
        each
        for picture in pictures
        for each in (list_pictures([Path(picture)]) if isinstance(picture, str | Path) else [picture])
    ]
    return list(tensors.guess(load(run, which, model=model), inputs))


def _place(run: Run | str | Path) -> Path:
    return run.path if isinstance(run, Run) else Path(run).expanduser()


def session(
    *,
    job: JobLike = None,
    metrics: Mapping[str, Any] | Sequence[str] | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> "contextlib.AbstractContextManager[Session]":
    """This process among all of a run, for a training loop of the user's own.

    Args:
        job: a Job or the path of a job.toml; what is given beside it wins over what it says.
        metrics: more figures of each evaluation, by name, as `fit` takes them.
        out: the run folder, in which each epoch is saved, and from which a loop over `epochs` goes on; None for none.
        settings: options of the train section (seed, norm_group, micro_batch, precision, clip …), or of any section as
            section__name. The learning rate is the user's own, unless schedule is given, with epochs.

    Returns:
        What `with` makes a Session of: rank, size, device, collectives, new_group, prepare, epochs, backward, evaluate,
        save.
    """
    return SessionBlock(_session(job, metrics, out, settings))


@contextlib.contextmanager
def _session(job: JobLike, metrics: Any, out: str | Path | None, settings: dict[str, Any]) -> "Iterator[Session]":
    with _hints_as_arguments():
        flags = _flags(settings, "session")
        if in_vain := sorted(
            {"train.batch", "train.lr", "train.optimizer", "train.weight_decay", "train.momentum"} & set(flags)
        ):
            what = f"a session takes no {in_vain[0].partition('.')[2]}"
            raise UserError(what, "session", ("optimizer and batch are what prepare is given",))
        named = {"data.name": OBJECTS, "run.out": str(out) if out else None, "train.metrics": metric_words(metrics)}
        loaded = load_on(job, {**flags, **named})
        settled = loaded.job
        # A recipe's are for what fit makes of its data set.
        given = {key for key, origin in loaded.origins.items() if not origin.startswith("recipe")}
        scheduled = "train.schedule" in given
        if scheduled and settled.train.schedule != "constant" and "train.epochs" not in given:
            mend = (f"session(schedule={settled.train.schedule!r}, epochs=30)",)
            raise UserError("a schedule needs the number of epochs", "session", mend)
        program = os.path.basename(sys.argv[0]).replace(" ", "_")  # noqa: PTH119 - sys.argv[0] may be "-c"
        place = _place_of(settled)
        open_session = load_worker("own_process").opened
        own: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
        with _folder_of(settled, place) as folder:
            try:
                with open_session(settled, place, program, folder, scheduled, own) as opened:
                    yield opened
            finally:
                if folder and not place.rank:
                    report_on(settled, folder)


def _folder_of(job: Job, place: Membership) -> contextlib.AbstractContextManager[RunFolder | None]:
    """The run folder where one is asked for, which rank 0 keeps."""
    if not job.run.out:
        return contextlib.nullcontext()
    return contextlib.nullcontext(NOWHERE) if place.rank else run_folder(job)
