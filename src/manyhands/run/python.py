"""The Python interface: fit, evaluate, load, predict and session, under plain python, a launcher, or with workers=N."""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.cluster.rendezvous import participate
from manyhands.config.job import Job, TrainOptions
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.folder import RunFolder
from manyhands.core.plugins import did_you_mean
from manyhands.core.records import EvaluationMetrics
from manyhands.core.world import Membership
from manyhands.report.page import write_report
from manyhands.report.read import read_run
from manyhands.run.train import Outcome, train, train_in_process

OBJECTS = "objects"


@dataclass(frozen=True)
class Run:
    """A run that has ended, read from its folder.

    Attributes:
        path: the run folder.
        status: "finished" or "stopped".
        model: the network, where `fit` was given an object.
    """

    path: Path
    status: str
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def evaluations(self) -> list[EvaluationMetrics]:
        """All evaluations, in order."""
        return read_run(self.path).evaluations

    @property
    def best(self) -> EvaluationMetrics:
        """The evaluation with the best top-1."""
        return max(self._evaluated(), key=lambda record: record.top1)

    @property
    def final(self) -> EvaluationMetrics:
        """The last evaluation."""
        return self._evaluated()[-1]

    def report(self) -> Path:
        """Writes report.html and its pictures, and says where."""
        return write_report(self.path)

    def _evaluated(self) -> list[EvaluationMetrics]:
        found = self.evaluations
        if not found:
            raise UserError("this run has no evaluation yet", str(self.path))
        return found


def fit(
    model: Any,
    train_set: Any,
    test_set: Any = None,
    *,
    workers: int | None = None,
    loss: Callable[..., Any] | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Trains a classifier and returns its run; `model` holds the trained weights afterwards.

    Args:
        model: a network, or a name such as "resnet18".
        train_set: a torch Dataset of (x, y), or a name or folder such as "cifar10".
        test_set: the same, for evaluation; without it a tenth of train_set is kept for that.
        workers: processes to start on this machine; None: this process, or the place torchrun gave it.
        loss: function (output, labels) of the mean loss or one per sample; cross-entropy if None.
        out: the run folder.
        quiet: no progress on standard error.
        settings: options of the train section (epochs, batch, lr …), or of any section as section__name.

    Raises:
        ManyhandsError: the run failed, or an argument is wrong.
    """
    from manyhands.train.samples import Objects

    flags = {**_flags(settings), "run.out": str(out) if out else None, "cluster.processes": workers}
    objects = Objects(loss=loss)
    if isinstance(model, str):
        flags["model.name"] = model
    else:
        flags["model.name"], objects.model = type(model).__name__, model
    if isinstance(train_set, str | Path):
        flags["data.name"] = str(train_set)
    else:
        flags["data.name"], objects.train_set, objects.test_set = OBJECTS, train_set, test_set
    job = load_job(flags).job
    outcome = _start(job, objects, workers, quiet=quiet)
    if workers is not None and objects.model is not None:
        _load_weights(objects.model, outcome.folder)
    return Run(outcome.folder.path, outcome.status, objects.model)


def _flags(settings: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as dotted keys: epochs is train.epochs, data__workers is data.workers."""
    flags: dict[str, Any] = {}
    for name, value in settings.items():
        if "__" in name:
            flags[name.replace("__", ".", 1)] = value
        elif name in TrainOptions.model_fields:
            flags[f"train.{name}"] = value
        else:
            hint = did_you_mean(name, TrainOptions.model_fields)
            raise UserError(f"fit has no argument {name}", "fit", (hint or "options of other sections: section__name",))
    return flags


def _start(job: Job, objects: Any, workers: int | None, *, quiet: bool) -> Outcome:
    if workers is not None:
        return train(job, quiet=quiet, objects=objects)
    place = participate(job.cluster)
    return train_in_process(job, place.membership or _on_its_own(job), quiet=quiet, objects=objects)


def _on_its_own(job: Job) -> Membership:
    return Membership(device=job.cluster.device, backend=job.cluster.backend)


def _load_weights(model: Any, folder: RunFolder) -> None:
    from manyhands.checkpoint.load import load, resolve

    model.load_state_dict(load(resolve(folder.path, "last")).model)


def evaluate(model: Any, test_set: Any, *, batch: int = 256) -> Any:
    """Evaluates a network on a data set in this process (or with the other processes of a launcher).

    Returns:
        An Evaluation: count, loss, top1, top5, confusion int64 [classes, classes].
    """
    with session() as here:
        here.job = load_job({"train.evaluate_batch": batch, "data.name": OBJECTS}).job
        return here.evaluate(model.to(here.device), test_set)


def load(run: Run | str | Path, which: str = "best", *, model: Any = None, device: str = "cpu") -> Any:
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
        network: in evaluation mode. transform: makes of a picture (a path, a PIL image, 8-bit pixels) what the network
        wants, [C, S, S]; numbers of a data set of one's own pass as they are. classes: a name for each output.

    Raises:
        UserError: there is no such run, or its network can't be made again without `model`.
    """
    from manyhands.run.inspect import resolve_checkpoint
    from manyhands.train.trained import open_trained

    live = copy.deepcopy(run.model) if isinstance(run, Run) and model is None else model
    return open_trained(resolve_checkpoint(_place(run), which), model=live, device=device)


def predict(run: Run | str | Path, pictures: Any, *, which: str = "best", model: Any = None) -> list[Any]:
    """The most likely classes of pictures: for each a list of (class name, probability).

    Args:
        run: what `fit` returned, a run folder, or a checkpoint.
        pictures: paths of files and folders, PIL images, 8-bit pixels, or tensors as the run's own data set gave them.
        which: "best" or "last", for a run.
        model: as `load` takes it.

    Raises:
        UserError: a picture can't be read, or how the run's own data set made its samples isn't known.
    """
    from manyhands.run.predict import list_pictures
    from manyhands.train.predict import guess

    if isinstance(pictures, str | Path):
        pictures = [pictures]
    inputs = [
        each
        for picture in pictures
        for each in (list_pictures([Path(picture)]) if isinstance(picture, str | Path) else [picture])
    ]
    return list(guess(load(run, which, model=model), inputs))


def _place(run: Run | str | Path) -> Path:
    return run.path if isinstance(run, Run) else Path(run).expanduser()


@contextlib.contextmanager
def session(**settings: Any) -> Iterator[Any]:
    """This process among all of a run, for a training loop of the user's own.

    Args:
        settings: options of the train section that a session uses: seed, norm_group, evaluate_batch.

    Yields:
        A Session: rank, size, device, collectives, new_group, prepare, backward, evaluate.
    """
    from manyhands.parallel.group import join, say_on_stderr
    from manyhands.run.worker import digest
    from manyhands.train.session import Session

    job = load_job({**_flags(settings), "data.name": OBJECTS}).job
    place = participate(job.cluster)
    group = join(
        place.membership or _on_its_own(job),
        f"{digest(job)} {os.path.basename(sys.argv[0])}",  # noqa: PTH119 - sys.argv[0] may be "-c"
        job.cluster.collective_timeout_s,
        say_on_stderr,
    )
    try:
        yield Session(group.world, job)
    finally:
        group.leave()


def parallelize(model: Any, plan: Any, *, sample: Any, session: Any, loss: Callable[..., Any] | None = None) -> Any:
    """Cuts a network by a plan, for a training loop of the user's own.

        with manyhands.session() as here:
            model = manyhands.parallelize(network, plan, sample=pictures[0], session=here)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model.backward(pictures, labels)  # the whole batch, on every process
            optimizer.step()

    Args:
        model: a network; its parameters become this process's pieces.
        plan: from `find_plan` or `read_plan`, a plan.json, or {"mesh": "dp=2,tp=2", "fc": "n@dp o@tp"}.
        sample: one input, without the batch's dimension; its numbers don't matter.
        session: the processes, as many as the plan's mesh has places.
        loss: function (output, labels) of the mean loss or one per sample; cross-entropy if None.

    Returns:
        A CutModel: backward, whole_state_dict, release; in evaluation it gives all outputs.

    Raises:
        UserError: the plan doesn't fit the network or the processes.
    """
    from manyhands.train.cut_model import CutModel

    return CutModel(model.to(session.device), as_plan(plan), sample.to(session.device), session.world, loss)


def as_plan(plan: Any) -> Any:
    """A plan from what users write: a Plan, the path of a plan.json, or strategies by op with the mesh among them."""
    from manyhands.core.mesh import parse_mesh
    from manyhands.parallel.plan import Plan, read_plan

    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(Path(plan))
    if not isinstance(plan, dict) or not all(isinstance(word, str) for word in (plan.get("mesh"), *plan.values())):
        raise UserError("a plan is a plan.json or a dict", "plan", ('such as {"mesh": "dp=2", "fc": "o@dp"}',))
    return Plan(parse_mesh(plan["mesh"]), {name: text for name, text in plan.items() if name != "mesh"})
