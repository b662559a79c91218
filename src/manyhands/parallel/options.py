"""The [parallel] section of a job."""

from typing import Literal

from pydantic import Field

from manyhands.core.choices import module_names, unknown_choice
from manyhands.core.options import Options

MODES = "manyhands.parallel.modes"
# Modes that are taken where no mode is named: usually, by one process alone, for a plan that is followed, and for one
# that is searched for. The head knows no more of them: what a mode says of itself imports torch.
USUAL_MODE, MODE_ALONE, MODE_OF_PLANS, MODE_OF_SEARCHES = "data", "single", "semi", "auto"
SEARCH = "search"


def check_mode(mode: str) -> None:
    """Raises UserError where no parallel mode has this name."""
    if mode not in module_names(MODES):
        raise unknown_choice("parallel mode", mode, module_names(MODES), "parallel.mode")


class ParallelOptions(Options):
    """The parallel mode, the mesh and the plan."""

    mode: str = Field(
        default=USUAL_MODE,
        description=f"how to parallelize: {', '.join(module_names(MODES))}; {MODE_OF_SEARCHES}: the fastest",
    )
    mesh: str = Field(
        default="", description="mesh of processes with named axes, such as dp=2,tp=2; empty: all along one axis dp"
    )
    pin: tuple[str, ...] = Field(
        default=(), description='for semi and auto: split of an op, given by module path or glob: "fc=n@dp o@tp"'
    )
    plan: str = Field(default="", description="for semi and auto: plan.json file to follow")
    samples: str = Field(
        default="", description="for hybrid: axes that divide the samples, such as dp; empty: all that shard no tensor"
    )
    fill: Literal["data", "search"] = Field(
        default="data",
        description="for semi: strategy of ops without a pin: data shards the samples, search finds the fastest",
    )
    memory: str = Field(default="", description="for auto: memory limit per process, such as 14GiB")
    link: str = Field(default="", description="for auto: bandwidth between machines, such as 1gbit; empty: measured")
    measure: bool = Field(default=True, description="for auto: time the best plans before choosing one")
    full_batch: bool = Field(
        default=False, description="for semi and auto: each process loads the full batch and takes its own part"
    )
    gradients_mean: bool = Field(
        default=True, description="average the gradients of all processes; false: sum them, as in MindSpore"
    )
    parameter_broadcast: bool = Field(
        default=False, description="broadcast rank 0's parameters at the start; false: check that all are equal"
    )

    shared_memory: bool = Field(
        default=True,
        description="for data: average CPU gradients within a machine through shared memory; false: by the backend",
    )

    @property
    def searches(self) -> bool:
        """True if the processes search for a plan."""
        return self.mode == MODE_OF_SEARCHES or (self.mode == MODE_OF_PLANS and self.fill == SEARCH)
