"""The [checkpoint] section of a job."""

from pydantic import Field

from manyhands.core.options import Options


class CheckpointOptions(Options):
    """When to save and what to keep."""

    every: str = Field(
        default="auto",
        pattern=r"^(\d+(\.\d+)?(s|min|h)|\d+(steps?|epochs?)|never|auto)$",
        description="auto: as often as what a save holds up and how often the run fails make best, 10 s to 30 min; a "
        'time ("60s", "10min"), "100steps", "1epoch" or "never"; the end and the best are always saved',
    )
    pieces: bool = Field(
        default=False,
        description="a network that is cut over processes is saved in pieces, each by the process that holds it (on a "
        "disk that all share); false: whole, by rank 0",
    )
    keep: int = Field(default=2, ge=1, description="the newest so many are kept, and the best")
    resume: str = Field(
        default="auto",
        description="auto: go on where --out holds an unfinished run; never; or a run, checkpoint or file",
    )
    pth_tar: str = Field(
        default="",
        description='a folder (such as ".") that gets imagenet main.py\'s checkpoint.pth.tar and model_best.pth.tar '
        "at the end of each epoch; empty: none",
    )
