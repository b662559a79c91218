"""The [parallel] section of a job."""

from typing import Literal

from pydantic import Field

from manyhands.core.options import Options
from manyhands.core.plugins import module_names, unknown_choice

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
    """Where tensors live, and which process does which part of the work."""

    mode: str = Field(
        default=USUAL_MODE, description=f"{', '.join(module_names(MODES))}; {MODE_OF_SEARCHES}: a search decides"
    )
    mesh: str = Field(
        default="", description="the processes as a grid with named axes: dp=2,tp=2; empty: one axis dp of all"
    )
    pin: tuple[str, ...] = Field(
        default=(), description='for semi and auto: how an op is split, "fc=n@dp o@tp", by module path or glob'
    )
    plan: str = Field(default="", description="for semi and auto: a plan.json to follow")
    samples: str = Field(
        default="", description="for hybrid: the axes that share out samples, such as dp; empty: all that cut nothing"
    )
    fill: Literal["data", "search"] = Field(
        default="data", description="for semi: ops without a strategy share out samples, or a search decides"
    )
    memory: str = Field(default="", description="for auto: the most that each process may take, such as 14GiB")
    link: str = Field(default="", description="for auto: the speed between machines, such as 1gbit; empty: measured")
    measure: bool = Field(default=True, description="for auto: time the best plans in turns before one is chosen")
    full_batch: bool = Field(
        default=False, description="for semi and auto: every process loads all samples of a batch, and takes its part"
    )
    gradients_mean: bool = Field(
        default=True, description="the mean of all processes' gradients; false: their sum, as in MindSpore"
    )
    parameter_broadcast: bool = Field(
        default=False, description="send rank 0's parameters to all at the start; false: prove that they are equal"
    )

    shared_memory: bool = Field(
        default=True,
        description="for data: processes of one machine's processor average through its memory; false: by the backend",
    )

    @property
    def searches(self) -> bool:
        """True where the processes are to search for a plan."""
        return self.mode == MODE_OF_SEARCHES or (self.mode == MODE_OF_PLANS and self.fill == SEARCH)
