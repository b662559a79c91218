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
from manyhands.config.load import ONE_WORD, is_switch, known_keys, load_on, meant_key
from manyhands.core.errors import EXIT_SAVED, ManyhandsError, UserError
from manyhands.core.records import EvaluationDetail, EvaluationMetrics
from manyhands.core.resuming import OBJECTS
from manyhands.core.run_folder import NOWHERE, RunFolder
from manyhands.core.stops import RECEIVED
from manyhands.core.user_code import announce
from manyhands.core.world import ProcessInfo
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
    """A finished run, read from its folder.

    Attributes:
        path: the run folder.
        status: "finished"; `fit` raises an exception for a stopped run.
        model: the trained network, if `fit` was given an object.
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
        """The best evaluation by the criterion train.best."""
        noted = [record for record in self._evaluated() if record.best]
        return noted[-1] if noted else max(self._evaluated(), key=lambda record: record.top1)

    @property
    def final(self) -> EvaluationMetrics:
        """The last evaluation."""
        return self._evaluated()[-1]

    @property
    def test(self) -> EvaluationDetail | None:
        """The final test of the best weights on held-out samples; None if no samples were held out."""
        return read_run(self.path).tests.get("best")

    @property
    def shares(self) -> list[int]:
        """The number of samples of each process in an update, by rank, at the end of the run."""
        return samples_of_each(read_run(self.path))

    def report(self) -> Path:
        """Writes report.html and its pictures, and returns the path of report.html."""
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

    return line if "manyhands " in line else _FLAG.sub(argument, line.replace("flag --", "argument --"))


@contextlib.contextmanager
def _hints_as_arguments() -> Iterator[None]:
    try:
        yield
    except ManyhandsError as error:
        error.where, error.hints = _as_arguments(error.where, ""), tuple(map(_as_arguments, error.hints))
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
    """Trains a classifier and returns the finished run. Afterwards `model` holds the trained weights.

    Args:
        model: a torch.nn.Module, or the name of a network such as "resnet18"; None: the network of the job.
        train_set: a torch Dataset of (x, y), or a name or folder such as "cifar10"; None: the data of the job.
        test_set: a Dataset to evaluate on, which also selects the best epoch; None: a tenth of train_set, held back.
        job: a Job or the path of a job.toml. Other arguments override the values of the job.
        held_out_set: a Dataset for the final test, evaluated once at the end, with the best and with the last weights.
        processes: number of processes to start on this machine; None: the number in the job, or this process alone,
            or this process as a rank of the group that torchrun started.
        loss: function of (output, labels) that returns the mean loss or one loss per sample, or a value of train.loss;
            None: cross-entropy.
        optimizer: function of the list of parameters that returns a torch.optim.Optimizer, such as torch.optim.RMSprop,
            or a value of train.optimizer. The schedule scales the learning rate of the optimizer.
        schedule: function of the update number, from 0, that returns the fraction of the peak learning rate, or
            function of one parameter named optimizer that returns a torch scheduler. Both may take total_steps and
            steps_per_epoch by these names. Or a value of train.schedule.
        metrics: additional evaluation metrics by name: functions of (outputs [n, C], labels [n]) that return one value
            per sample, or objects with update(outputs, labels), which returns sums, and compute(sums). Or a value of
            train.metrics.
        at_epoch_end: function of an EpochEnd, called on rank 0 after each epoch and its evaluation, while the other
            processes wait. An exception ends the run.
        out: the run folder.
        quiet: print no progress on standard error.
        settings: options of the train section (epochs, batch, lr …), or of any section as section__name.

    Raises:
        ManyhandsError: an argument is wrong, or the run failed.
        KeyboardInterrupt: Ctrl-C was pressed, and the run is saved.
        SystemExit: SIGTERM or another request to stop arrived, and the run is saved; the exit code is 75.
    """
    if job is None and (model is None or train_set is None):
        what = "network" if model is None else "training set"
        raise UserError(f"fit has no {what}", "fit", ("call fit(model, train_set)", "or fit(job=…)"))
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
        raise UserError("at_epoch_end is not a function", "fit", ("such as at_epoch_end=lambda end: print(end.epoch)",))
    if not (optimizer is None or isinstance(optimizer, str) or callable(optimizer)):
        hints = ("pass a function of the parameters, such as optimizer=torch.optim.RMSprop",)
        raise UserError(f"the optimizer is a {type(optimizer).__name__}, not a function", "fit", hints)
    live: dict[str, Any] = {name: one for name, one in own.items() if not isinstance(one, str)}
    objects = Objects(None if isinstance(model, str) else model, at_epoch_end=at_epoch_end, **live)
    objects.metrics = metrics if isinstance(metrics, Mapping) else None
    if named.get("data.name") == OBJECTS:
        objects.train_set, objects.test_set = train_set, test_set
    _refuse_what_is_lost(named.get("data.name"), test_set, held_out_set)
    objects.held_out_set = held_out_set
    buffers: Any = getattr(loss, "buffers", tuple)
    measured = {f"metric {name}": one for name, one in (objects.metrics or {}).items()}
    objects.digests = digest_objects(**live, network=objects.model, loss_weights=tuple(buffers()), **measured)
    if objects.model is not None:
        objects.digests |= load_worker("own_process").digest_of_network(objects.model)
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
            raise KeyboardInterrupt(f"saved in {outcome.folder.path}; run the same program again to resume")
        raise SystemExit(EXIT_SAVED)
    return Run(outcome.folder.path, outcome.status, objects.model)


def _options_of(model: Any) -> dict[str, Any]:
    """Options that follow from a network, as dotted keys. Raises UserError: it is none."""
    if model is None or isinstance(model, str):
        return {"model.name": model}
    if isinstance(model, type) or not hasattr(model, "named_parameters"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(
            f"model is {kind}, not a network", "model", ("pass a torch.nn.Module, such as nn.Linear(64, 10)",)
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
        return (f"to start processes, pass processes={value}", f"for the data loader, pass data__workers={value}")
    key = f"{name}.{ONE_WORD[name]}" if name in ONE_WORD else meant_key(name)
    if key in {"data.name", "model.name"}:
        return ("pass network and data to fit(model, train_set), or to prepare of a session",)
    argument = {"run.out": "out"}.get(key, key.removeprefix("train.").replace(".", "__"))
    return (f"did you mean {argument}?" if key else "write options of other sections as section__name",)


def _refuse_what_is_lost(name: str | None, test_set: Any, held_out_set: Any) -> None:
    """Raises UserError for a set that would be passed over, since the training set isn't an object."""
    if name == OBJECTS:
        return
    for word, given, hints in (
        ("test_set", test_set, "use the test split of the named data set, or data__validation=0.1 for a part of it"),
        ("held_out_set", held_out_set, 'pass a name or folder: data__held_out="./folder"'),
    ):
        if given is not None:
            raise UserError(f"{word} needs a train_set that is a Dataset, not a name", word, (hints,))


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
        hints = ("remove processes to train with this group", "or call fit before the group is created")
        raise UserError("fit can't start processes: this process is already in a process group", "fit", hints)
    # A launcher's place wins over the job's number of processes.
    elsewhere = place_of(job).process_info is None
    return train(job, quiet=quiet, objects=objects), elsewhere


def _place_of(job: Job) -> ProcessInfo:
    """This process's place: in the group that it is in already, as a launcher gave it, or on its own."""
    return _standing(job.cluster.device, job.cluster.backend) or place_of(job).process_info or _on_its_own(job)


def _standing(device: str, backend: str) -> ProcessInfo | None:
    """The place in a process group that the script has made already; who hasn't imported torch has made none."""
    if "torch.distributed" not in sys.modules:
        return None
    return load_worker("own_process").existing_process_info(device, backend)


def _on_its_own(job: Job) -> ProcessInfo:
    return ProcessInfo(device=job.cluster.device, backend=job.cluster.backend)


@_hints_as_arguments()
def evaluate(
    model: "nn.Module | Run | str | Path",
    test_set: Any,
    *,
    batch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    job: JobLike = None,
) -> "Evaluation":
    """Evaluates a network on a data set in this process, or in all processes of a launcher.

    8-bit pictures are normalized with the mean and standard deviation of the training data, which `fit`, `load` and
    `Session.prepare` attach to the network. Float tensors are used unchanged.

    Args:
        model: a network; or a Run, a run folder or a checkpoint, of which the best weights are evaluated.
        test_set: a torch Dataset of (x, y).
        batch: samples per pass; None: the value in the job, or 256.
        metrics: additional metrics by name, as in `fit`.
        job: a Job or the path of a job.toml.

    Raises:
        UserError: a sample does not fit the network, the normalization is unknown, or an argument is wrong.
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
    """Loads the trained network of a run, ready for inference.

        network, transform, classes = manyhands.load("runs/pets")
        scores = network(transform("cat.jpg")[None])
        print(classes[scores.argmax()])

    Args:
        run: a Run, a run folder or a checkpoint.
        which: "best" or "last", if `run` is a run.
        model: a network to load the weights into, or its name; required if the run trained a Python object.
        device: torch device of the network.

    Returns:
        A Trained with three fields. network: the network in evaluation mode. transform: function that turns a picture
        (a path, a PIL image or 8-bit pixels) into an input tensor [C, S, S]; tensors of your own data pass unchanged.
        classes: the class name of each output.

    Raises:
        UserError: the run does not exist, or its network can't be rebuilt without `model`.
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
    """Returns the most likely classes of each picture, as a list of (class name, probability).

    Args:
        run: a Run, a run folder or a checkpoint.
        pictures: paths of files and folders, PIL images, 8-bit pixels, or tensors as in the training data.
        which: "best" or "last", if `run` is a run.
        model: the network, as in `load`.

    Raises:
        UserError: a picture can't be read, or the preprocessing of the training data is unknown.
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
    """Opens a session for your own training loop: `with manyhands.session() as here`.

    Args:
        job: a Job or the path of a job.toml. Other arguments override the values of the job.
        metrics: additional evaluation metrics by name, as in `fit`.
        out: the run folder, in which each epoch is saved and from which a loop over `epochs` resumes; None: no folder.
        settings: options of the train section (seed, norm_group, micro_batch, precision, clip …), or of any section as
            section__name. The loop sets the learning rate itself, unless schedule and epochs are given.

    Returns:
        A context manager that gives a Session with rank, size, device, collectives, new_group, prepare, epochs,
        backward, evaluate and save.
    """
    return SessionBlock(_session(job, metrics, out, settings))


@contextlib.contextmanager
def _session(job: JobLike, metrics: Any, out: str | Path | None, settings: dict[str, Any]) -> "Iterator[Session]":
    with _hints_as_arguments():
        flags = _flags(settings, "session")
        if in_vain := sorted(
            {"train.batch", "train.lr", "train.optimizer", "train.weight_decay", "train.momentum"} & set(flags)
        ):
            what = f"session has no argument {in_vain[0].partition('.')[2]}"
            raise UserError(what, "session", ("pass optimizer and batch to prepare of the session",))
        named = {"data.name": OBJECTS, "run.out": str(out) if out else None, "train.metrics": metric_words(metrics)}
        loaded = load_on(job, {**flags, **named})
        resolved = loaded.job
        # A recipe's are for what fit makes of its data set.
        given = {key for key, origin in loaded.origins.items() if not origin.startswith("recipe")}
        scheduled = "train.schedule" in given
        if scheduled and resolved.train.schedule != "constant" and "train.epochs" not in given:
            hints = (f"pass epochs too: session(schedule={resolved.train.schedule!r}, epochs=30)",)
            raise UserError("session has a schedule, but no number of epochs", "session", hints)
        program = os.path.basename(sys.argv[0]).replace(" ", "_")  # noqa: PTH119 - sys.argv[0] may be "-c"
        place = _place_of(resolved)
        open_session = load_worker("own_process").opened
        own: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
        with _folder_of(resolved, place) as folder:
            try:
                with open_session(resolved, place, program, folder, scheduled, own) as opened:
                    yield opened
            finally:
                if folder and not place.rank:
                    report_on(resolved, folder)


def _folder_of(job: Job, place: ProcessInfo) -> contextlib.AbstractContextManager[RunFolder | None]:
    """The run folder where one is asked for, which rank 0 keeps."""
    if not job.run.out:
        return contextlib.nullcontext()
    return contextlib.nullcontext(NOWHERE) if place.rank else run_folder(job)
