"""What the Python interface computes in the user's own process: a session, a cut network, a trained one."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from manyhands.checkpoint.find import resolve
from manyhands.checkpoint.load import load
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.core.mesh import parse_mesh
from manyhands.core.shown import say
from manyhands.core.world import Membership
from manyhands.data.on_demand import as_picture
from manyhands.parallel.group import join
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.standing import standing_membership
from manyhands.train.predict import guess
from manyhands.train.session import Session
from manyhands.train.split_model import SplitModel
from manyhands.train.trained import open_trained
from manyhands.worker.shared_options import shared_options

__all__ = ["as_picture", "guess", "guess_files", "load_weights", "open_trained", "opened", "parallelize",
           "standing_membership"]  # fmt: skip


@contextlib.contextmanager
def opened(job: Job, membership: Membership, program: str) -> Iterator[Session]:
    """A session at a place among the processes; `program` must be the same on all of them."""
    options = f"{shared_options(job)} program={program}"
    group = join(membership, options, job.cluster.collective_timeout_s, say)
    try:
        yield Session(group.world, job)
    finally:
        group.leave()


def load_weights(model: nn.Module, run: Path) -> None:
    """Gives a network the last weights of a run."""
    model.load_state_dict(load(resolve(run, "last")).model)


def guess_files(path: Path, files: Sequence[Path], model: str | None, device: str) -> Iterator[list[tuple[str, float]]]:
    """The most likely classes of each picture, by the network of a checkpoint."""
    return guess(open_trained(path, model=model, device=device), files)


def parallelize(
    model: nn.Module,
    plan: Plan | str | Path | Mapping[str, str],
    *,
    sample: Tensor,
    session: Session,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> SplitModel:
    """Cuts a network by a plan, for a training loop of the user's own.

        with manyhands.session() as here:
            model = manyhands.parallelize(network, plan, sample=pictures[0], session=here)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model.backward(pictures, labels)  # the whole batch, on every process
            optimizer.step()

    Args:
        model: a network; its parameters become this process's pieces.
        plan: from `find_plan`, a plan.json, or {"mesh": "dp=2,tp=2", "fc": "n@dp o@tp"}.
        sample: one input, without the batch's dimension; its numbers don't matter.
        session: the processes, as many as the plan's mesh has places.
        loss: function (output, labels) of the mean loss or one per sample; cross-entropy if None.

    Returns:
        A SplitModel: backward, whole_state_dict, release; in evaluation it gives all outputs.

    Raises:
        UserError: the plan doesn't fit the network or the processes.
    """
    return SplitModel(model.to(session.device), as_plan(plan), sample.to(session.device), session.world, loss)


def as_plan(plan: Plan | str | Path | Mapping[str, str]) -> Plan:
    """A plan from what users write: a Plan, the path of a plan.json, or strategies by op with the mesh among them."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(Path(plan))
    given: Any = plan
    if not isinstance(given, Mapping) or not all(
        isinstance(word, str) for word in (given.get("mesh"), *given.values())
    ):
        raise UserError("a plan is a plan.json or a dict", "plan", ('such as {"mesh": "dp=2", "fc": "o@dp"}',))
    return Plan(parse_mesh(plan["mesh"]), {name: text for name, text in plan.items() if name != "mesh"})
