"""The [checkpoint] section of a job."""

from manyhands.core.options import Options, option


class CheckpointOptions(Options):
    """Options of checkpoint intervals and retention."""

    every: str = option(
        "auto",
        'interval between checkpoints: a time ("60s", "10min"), "100steps", "1epoch" or "never"; auto: 10 s to 30 '
        "min, depending on the cost of a save and how often the run fails; the best and the last state are always "
        "saved",
        pattern=r"^(\d+(\.\d+)?(s|min|h)|\d+(steps?|epochs?)|never|auto)$",
    )
    pieces: bool = option(
        False,
        "save a sharded network as shards, each written by the process that holds it (requires a shared disk); false: "
        "rank 0 writes the unsharded network",
    )
    keep: int = option(2, "number of latest checkpoints to keep, in addition to the best one", ge=1)
    resume: str = option(
        "auto",
        "auto: resume an unfinished run in --out; never: start anew; otherwise the path of a run, a checkpoint or a "
        "weights file",
    )
    pth_tar: str = option(
        "",
        'folder for checkpoint.pth.tar and model_best.pth.tar, such as "."; both are written after each epoch in the '
        "format of main.py, the ImageNet example of PyTorch; empty: not written",
    )
