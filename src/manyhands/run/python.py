"""The Python interface: fit, evaluate, load, predict and session, in one process, under torchrun or multi-process."""

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

from typing_extensions import override

from manyhands.config.job import OBJECT, Job, TrainOptions
from manyhands.config.load import ONE_WORD, announce, is_switch, known_keys, load_job_argument, meant_key
from manyhands.core import records, stops
from manyhands.core.errors import EXIT_SAVED, ManyhandsError, UserError
from manyhands.core.run_folder import NOWHERE, OBJECTS
from manyhands.core.world import ProcessInfo
from manyhands.report import changes, page, read, summary, time_shares
from manyhands.run.folder import read_network_record, run_folder
from manyhands.run.outcome import Outcome, report_on
from manyhands.run.tasks import list_pictures, use_checkpoint
from manyhands.run.train import launch_decision, train, train_in_process
from manyhands.train.objects import Objects, digest_objects, metric_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.train.loss import Evaluation
    from manyhands.train.objects import AtEpochEnd
    from manyhands.train.optimize import MakeOptimizer
    from manyhands.train.session import Session
    from manyhands.train.trained import Trained

JobLike = Job | str | Path | None  # the argument `job` of each function


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    Attributes:
        path: the run folder.
        status: always "finished", because `fit` raises an exception if the run is stopped.
        model: the trained network; None if `fit` was called with the name of a network.
    """

    path: Path
    status: str
    model: "nn.Module | None" = field(default=None, repr=False, compare=False)

    @property
    def evaluations(self) -> list[records.EvaluationMetrics]:
        """All evaluations, in order."""
        return read.read_run(self.path).evaluations

    @property
    def best(self) -> records.EvaluationMetrics:
        """The best evaluation according to the option train.best."""
        found = summary.best_evaluation(read.read_run(self.path))
        return found if isinstance(found, records.EvaluationMetrics) else self.final  # which raises UserError

    @property
    def final(self) -> records.EvaluationMetrics:
        """The last evaluation."""
        if not (found := self.evaluations):
            raise UserError("this run has no evaluation yet", str(self.path))
        return found[-1]

    @property
    def test(self) -> records.EvaluationDetail | None:
        """The final test of the best weights; None if the run has no held-out data set."""
        return read.read_run(self.path).tests.get("best")

    @property
    def shares(self) -> list[int]:
        """The number of samples per update of each rank, at the end of the run."""
        return time_shares.samples_by_rank(read.read_run(self.path))

    def report(self) -> Path:
        """Writes report.html and its pictures, and returns the path of report.html."""
        return page.write_report(self.path)


_FLAG = re.compile(  # a flag in a hint and its value, if the next word is no word of the sentence
    r"""(?<![\w-])(?:
        --set\ (?P<quote>['"]?)(?P<key>[\w.]+)=(?P<set>.+?)(?P=quote)(?=[,;:)]?(?:\s|$))
        |-(?P<name>n|-[a-z][\w-]*(?:\.[\w-]+)?)
        (?:\ (?!(?:or|and|at|with|starts|to|that|is|for|of|out)\b)
            (?P<value>(?:an?|another)\ [^,;:()]+|[^\s,;()]*[^\s,;:.()]))?
    )""",
    re.VERBOSE,
)
# By flag, options that have another name than the flag.
_OPTIONS = {"n": "processes", "sync": "sync.method", "parallel": "parallel.mode", "data_dir": "data.dir"}


def _as_arguments(line: str, bare: str = "=…") -> str:
    """Rewrites "--lr 0.1" in a hint as "lr=0.1", and "--lr" as "lr" + `bare`; keeps lines with commands unchanged."""

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
        error.message = re.sub(r"^-(n|-sync) \S+", lambda flag: _as_arguments(flag[0]), error.message)
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
        test_set: a Dataset to evaluate on, and to select the best epoch by; None: the evaluation set of the data, or a
            tenth of train_set.
        job: a Job or the path of a job.toml. Other arguments override the values of the job.
        held_out_set: a Dataset for the final test, evaluated once at the end, with the best and with the last weights.
        processes: number of processes to start on this machine; None: the number in the job. If neither is set, this
            process trains alone, or as one of the ranks that torchrun started.
        loss: function of (output, labels) that returns the mean loss or one loss per sample; or a value of the option
            train.loss; None: cross-entropy.
        optimizer: function of the list of parameters that returns a torch.optim.Optimizer, such as torch.optim.RMSprop;
            or a value of the option train.optimizer. The schedule scales the learning rate of the optimizer.
        schedule: function of the update number (from 0) that returns the fraction of the peak learning rate; or
            function with a first parameter named optimizer that returns a torch scheduler. Both kinds may
            also take total_steps and steps_per_epoch. Or a value of the option train.schedule.
        metrics: additional evaluation metrics by name: functions of (outputs [n, C], labels [n]) that return one value
            per sample, or objects with update(outputs, labels), which returns sums, and compute(sums). Or a value of
            the option train.metrics.
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
        raise UserError(f"fit was called without a {what}", "fit", ("call fit(model, train_set)", "or fit(job=…)"))
    named = _options_of(model) | {"train.metrics": metric_names(metrics), "cluster.processes": processes}
    named["run.out"] = str(out) if out else None
    if train_set is not None:
        named["data.name"] = str(train_set) if isinstance(train_set, str | Path) else OBJECTS
    functions = {"optimizer": optimizer, "loss": loss, "schedule": schedule}
    named |= {f"train.{key}": one if one is None or isinstance(one, str) else OBJECT for key, one in functions.items()}
    loaded = load_job_argument(job, {**_options_by_key(settings, "fit"), **named})
    if at_epoch_end is not None and not callable(at_epoch_end):
        raise UserError("at_epoch_end is not a function", "fit", ("such as at_epoch_end=lambda end: print(end.epoch)",))
    if not (optimizer is None or isinstance(optimizer, str) or callable(optimizer)):
        hints = ("pass a function of the parameters, such as optimizer=torch.optim.RMSprop",)
        raise UserError(f"the optimizer is a {type(optimizer).__name__}, not a function", "fit", hints)
    live: dict[str, Any] = {name: value for name, value in functions.items() if not isinstance(value, str)}
    objects = Objects(None if isinstance(model, str) else model, at_epoch_end=at_epoch_end, **live)
    objects.metrics = metrics if isinstance(metrics, Mapping) else None
    objects.held_out_set = held_out_set
    if named.get("data.name") == OBJECTS:
        objects.train_set, objects.test_set = train_set, test_set
    elif test_set is not None or held_out_set is not None:  # would be ignored
        test = "use the test split of the named data set, or data__validation=0.1 for a part of it"
        held_out = 'pass a name or folder: data__held_out="./folder"'
        word, hint = ("held_out_set", held_out) if test_set is None else ("test_set", test)
        raise UserError(f"{word} needs a train_set that is a Dataset, not a name", word, (hint,))
    buffers: Any = getattr(loss, "buffers", tuple)
    measured = {f"metric {name}": one for name, one in (objects.metrics or {}).items()}
    objects.digests = digest_objects(**live, network=objects.model, loss_weights=tuple(buffers()), **measured)
    if objects.model is not None:
        from manyhands.worker.own_process import digest_trainable, digest_weights

        objects.digests |= digest_trainable(objects.model) | digest_weights(objects.model)

    def digests() -> dict[str, str]:
        from manyhands.worker.own_process import digest_data_objects

        return objects.digests | digest_data_objects(loaded.job, objects)

    changes.refuse_changes(loaded, digests=digests)
    stops.RECEIVED.clear()
    outcome = _train(loaded.job, objects, processes, quiet=quiet)
    if outcome.status == "stopped":
        if signal.SIGINT in stops.RECEIVED:
            raise KeyboardInterrupt(f"saved in {outcome.folder.path}; run the same program again to resume")
        raise SystemExit(EXIT_SAVED)
    return Run(outcome.folder.path, outcome.status, objects.model)


def _train(job: Job, objects: Objects, processes: int | None, *, quiet: bool) -> Outcome:
    """Trains in this process, or in new processes, whose final weights are then loaded into the user's network."""
    existing = _existing_group(job)
    if existing and processes is not None:
        hints = ("remove processes to train with this group", "or call fit before the group is created")
        raise UserError("fit can't start processes: this process is already in a process group", "fit", hints)
    if existing or not (processes is not None or job.cluster.processes):
        return train_in_process(job, _process_info(job), quiet=quiet, objects=objects)
    elsewhere = launch_decision(job).process_info is None  # a launcher takes precedence over cluster.processes
    outcome = train(job, quiet=quiet, objects=objects)
    if elsewhere and objects.model is not None:
        from manyhands.worker.own_process import load_weights

        load_weights(objects.model, outcome.folder.path)
    return outcome


def _options_of(model: Any) -> dict[str, Any]:
    """Returns the options that the argument `model` sets, by dotted key. Raises UserError if it is not a network."""
    if model is None or isinstance(model, str):
        return {"model.name": model}
    if isinstance(model, type) or not hasattr(model, "named_parameters"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        hints = ("pass a torch.nn.Module, such as nn.Linear(64, 10)",)
        raise UserError(f"model is {kind}, not a network", "model", hints)
    # A float64 network receives its inputs unchanged, as in a session; a network of mixed types keeps its types.
    double = {str(one.dtype) for one in model.parameters()} == {"torch.float64"}
    return {"model.name": type(model).__name__, **({"train.precision": "fp64"} if double else {})}


def _options_by_key(settings: dict[str, Any], function: str) -> dict[str, Any]:
    """Converts keyword arguments to options by dotted key: epochs to train.epochs, data__workers to data.workers."""
    flags: dict[str, Any] = {}
    for name, value in settings.items():
        if "__" in name:
            flags[name.replace("__", ".", 1)] = value
        elif name in TrainOptions.model_fields:
            flags[f"train.{name}"] = value
        else:
            raise UserError(f"{function} has no argument {name}", function, _hints_for(name, value))
    return flags


def _hints_for(name: str, value: Any) -> tuple[str, ...]:
    if name == "workers":
        return (f"to start processes, pass processes={value}", f"for the data loader, pass data__workers={value}")
    key = f"{name}.{ONE_WORD[name]}" if name in ONE_WORD else meant_key(name)
    if key in {"data.name", "model.name"}:
        return ("pass the network and the data to fit(model, train_set), or to the prepare method of a session",)
    argument = {"run.out": "out"}.get(key, key.removeprefix("train.").replace(".", "__"))
    return (f"did you mean {argument}?" if key else "write options of other sections as section__name",)


def _existing_group(job: Job) -> ProcessInfo | None:
    """Returns this process's rank and size in the process group that the user's script created, or None."""
    if "torch.distributed" not in sys.modules:
        return None
    from manyhands.worker.own_process import existing_process_info

    return existing_process_info(job.cluster.device, job.cluster.backend)


def _process_info(job: Job) -> ProcessInfo:
    launched = _existing_group(job) or launch_decision(job).process_info
    return launched or ProcessInfo(device=job.cluster.device, backend=job.cluster.backend)


@_hints_as_arguments()
def evaluate(
    model: "nn.Module | Run | str | Path",
    test_set: Any,
    *,
    batch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    job: JobLike = None,
) -> "Evaluation":
    """Evaluates a network on a data set in this process, or in all processes that a launcher started.

    8-bit pictures are normalized with the mean and standard deviation of the training data, which `fit`, `load` and
    `Session.prepare` attach to the network. Float tensors are used unchanged.

    Args:
        model: a network, a Run, a run folder or a checkpoint. For a run, its best weights are evaluated.
        test_set: a torch Dataset of (x, y).
        batch: the batch size on each process; None: train.evaluate_batch of the job, or 256.
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
        which: the weights of the run to load, "best" or "last".
        model: a network to load the weights into, or its name; required if the run was given a network object.
        device: torch device of the network.

    Returns:
        A Trained with three fields. network: the network in evaluation mode. transform: function that turns a picture
        (a path, a PIL image or 8-bit pixels) into an input tensor [C, S, S]; if the network was trained on a Dataset of
        tensors, it accepts such tensors and doesn't normalize them. classes: the class name of each output.

    Raises:
        UserError: the run does not exist, or its network can't be rebuilt without `model`.
    """
    live = copy.deepcopy(run.model) if isinstance(run, Run) and model is None else model

    def opened(path: Path) -> "Trained":
        record = read_network_record(path)
        if live is None and record and not isinstance(run, Run):
            announce([record.name], path, record, "load(RUN, model={!r})")
        from manyhands.worker.own_process import open_trained

        return open_trained(path, model=live, device=device)

    return use_checkpoint(run.path if isinstance(run, Run) else Path(run).expanduser(), which, opened)


@_hints_as_arguments()
def predict(
    run: Run | str | Path, pictures: Any, *, which: str = "best", model: "nn.Module | str | None" = None
) -> list[list[tuple[str, float]]]:
    """Returns for each picture a list of its most likely classes, as (class name, probability).

    Args:
        run: a Run, a run folder or a checkpoint.
        pictures: paths of files and folders, PIL images, 8-bit pixels, or tensors as in the training data.
        which: the weights of the run to load, "best" or "last".
        model: the network, as in `load`.

    Raises:
        UserError: a picture can't be read, or the preprocessing of the training data is unknown.
    """
    from manyhands.worker.own_process import guess, to_pil_image

    if isinstance(pictures, str | Path) or not hasattr(pictures, "__iter__") or to_pil_image(pictures):
        pictures = [pictures]  # one picture, not a sequence of its channels
    inputs: list[Any] = []
    for picture in pictures:
        inputs += list_pictures([Path(picture)]) if isinstance(picture, str | Path) else [picture]
    return [one for one in guess(load(run, which, model=model), inputs) if not isinstance(one, str)]  # none is


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
        out: the run folder, where `Session.epochs` saves checkpoints and resumes from; None: nothing is saved.
        settings: options of the train section (seed, norm_group, micro_batch, precision, clip …), or of any section as
            section__name. Your loop sets the learning rate, unless the options schedule and epochs are both set.

    Returns:
        A context manager that gives a Session with rank, size, device, collectives, new_group, prepare, epochs,
        backward, evaluate and save.
    """
    return _SessionBlock(_session(job, metrics, out, settings))


class _SessionBlock(contextlib.AbstractContextManager["Session"]):
    """The context manager that `session()` returns: opens a session, and closes it in all processes."""

    def __init__(self, block: "contextlib.AbstractContextManager[Session]") -> None:
        self._block = block

    @override
    def __enter__(self) -> "Session":
        return self._block.__enter__()

    @override
    def __exit__(self, *ended: Any) -> bool | None:
        return self._block.__exit__(*ended)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UserError("the session is not open", f"session.{name}", ("open it: with manyhands.session() as here: …",))


@contextlib.contextmanager
def _session(job: JobLike, metrics: Any, out: str | Path | None, settings: dict[str, Any]) -> "Iterator[Session]":
    with _hints_as_arguments():
        flags = _options_by_key(settings, "session")
        of_prepare = {"train.batch", "train.lr", "train.optimizer", "train.weight_decay", "train.momentum"}
        if unused := sorted(of_prepare & set(flags)):
            what = f"session has no argument {unused[0].partition('.')[2]}"
            raise UserError(what, "session", ("pass optimizer and batch to the prepare method of the session",))
        named = {"data.name": OBJECTS, "run.out": str(out) if out else None, "train.metrics": metric_names(metrics)}
        loaded = load_job_argument(job, {**flags, **named})
        resolved = loaded.job
        # A recipe's values apply only to fit.
        given = {key for key, origin in loaded.origins.items() if not origin.startswith("recipe")}
        scheduled = "train.schedule" in given
        if scheduled and resolved.train.schedule != "constant" and "train.epochs" not in given:
            hints = (f"pass epochs too: session(schedule={resolved.train.schedule!r}, epochs=30)",)
            raise UserError("session has a schedule, but no number of epochs", "session", hints)
        program = os.path.basename(sys.argv[0]).replace(" ", "_")  # noqa: PTH119 - sys.argv[0] may be "-c"
        process_info = _process_info(resolved)
        from manyhands.worker.own_process import open_session

        functions: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
        with contextlib.ExitStack() as stack:
            folder = NOWHERE if resolved.run.out else None
            if resolved.run.out and not process_info.rank:  # rank 0 keeps the run folder
                folder = stack.enter_context(run_folder(resolved))
                stack.callback(report_on, resolved, folder)
            yield stack.enter_context(open_session(resolved, process_info, program, folder, scheduled, functions))
