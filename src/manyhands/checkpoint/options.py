"""The [checkpoint] section of a job."""

from pydantic import Field

from manyhands.core.options import Options


class CheckpointOptions(Options):
    """Checkpoint intervals and retention."""

    every: str = Field(
        default="auto",
        pattern=r"^(\d+(\.\d+)?(s|min|h)|\d+(steps?|epochs?)|never|auto)$",
        description="auto: every 10 s to 30 min, by the cost of a save and how often the run fails; or a "
        'time ("60s", "10min"), "100steps", "1epoch" or "never"; the end and the best are always saved',
    )
    pieces: bool = Field(
        default=False,
        description="save a sharded network in pieces, each by the process that holds the shard (on a "
        "shared disk); false: as a full network, by rank 0",
    )
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints to keep, besides the best")
    resume: str = Field(
        default="auto",
        description="auto: resume an unfinished run in --out; never; or a run, checkpoint or file",
    )
    pth_tar: str = Field(
        default="",
        description='folder (such as ".") for checkpoint.pth.tar and model_best.pth.tar as main.py writes them, '
        "after each epoch; empty: none",
    )
