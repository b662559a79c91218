"""The [parallel] section of a job."""

from typing import Literal

from manyhands.core.choices import module_names, unknown_choice_error
from manyhands.core.options import Options, option

MODES = "manyhands.parallel.modes"
# The default modes: usual, one process, a given plan, a search. The launcher names them, since modes import torch.
USUAL_MODE, MODE_ALONE, MODE_OF_PLANS, MODE_OF_SEARCHES = "data", "single", "semi", "auto"
SEARCH = "search"


def check_mode(mode: str) -> None:
    """Raises UserError if no parallel mode has this name."""
    if mode not in module_names(MODES):
        raise unknown_choice_error("parallel mode", mode, module_names(MODES), "parallel.mode")


class ParallelOptions(Options):
    """Options of the parallel mode, the mesh and the plan."""

    mode: str = option(
        USUAL_MODE,
        f"parallel mode: {', '.join(module_names(MODES))}; {MODE_OF_SEARCHES}: the fastest plan that a search finds",
    )
    mesh: str = option("", "device mesh with named axes, such as dp=2,tp=2; empty: all processes along one axis, dp")
    pin: tuple[str, ...] = option(
        (),
        'sharding of the ops that match a module path or glob: "fc=n@dp o@tp" shards the samples (n) of fc over '
        "the axis dp and its output features (o) over tp; used only with modes semi and auto",
    )
    plan: str = option("", "plan.json with the sharding of each op; used only with modes semi and auto")
    samples: str = option(
        "",
        "mesh axes that shard the batch, such as dp; empty: axes that shard no parameter; used only with mode hybrid",
    )
    fill: Literal["data", "search"] = option(
        "data",
        "sharding of ops that are not pinned; data: shard the batch; search: fastest found; used only with mode semi",
    )
    memory: str = option("", "memory limit per process, such as 14GiB; used only when searching for a plan")
    link: str = option(
        "", "bandwidth between machines, such as 1gbit; empty: measured; used only when searching for a plan"
    )
    measure: bool = option(True, "time the best plans before choosing one; used only when searching for a plan")
    full_batch: bool = option(
        False, "each process loads the full batch and takes its own shard of it; used only with modes semi and auto"
    )
    gradients_mean: bool = option(True, "average the gradients over all processes; false: sum them, as in MindSpore")
    parameter_broadcast: bool = option(
        False, "broadcast the parameters of rank 0 at startup; false: check that all processes have equal parameters"
    )
    shared_memory: bool = option(
        True, "average CPU gradients within a machine through shared memory; false: with gloo; used only with mode data"
    )

    @property
    def searches(self) -> bool:
        """True if training begins with a search for the fastest plan."""
        return self.mode == MODE_OF_SEARCHES or (self.mode == MODE_OF_PLANS and self.fill == SEARCH)
