"""The [data] section of a job."""

from typing import Literal

from pydantic import Field

from manyhands.core.options import Options


class DataOptions(Options):
    """Which samples, and how they become pixels."""

    name: str = Field(default="digits", description="a data set's name, a folder, or file.py:function")
    dir: str = Field(default="", description="where named data sets lie; the user's cache folder if empty")
    download: bool = Field(default=True, description="fetch a named data set that isn't there")
    image_size: int = Field(default=0, ge=0, le=4096, description="pixels; 0: the data set's own, or the model's")
    channels: Literal[0, 1, 3] = Field(default=0, description="0: the data set's own, or what the model needs")
    mean: tuple[float, ...] = Field(default=(), description="per channel, of pixels in 0 to 1; empty: the data set's")
    std: tuple[float, ...] = Field(default=(), description="per channel, of pixels in 0 to 1; empty: the data set's")
    augment: Literal["auto", "none", "crop", "crop-flip", "resized-crop-flip"] = Field(
        default="auto",
        description="crop: shift by padding; crop-flip: with mirror; resized-crop-flip: ImageNet's; auto: the recipe",
    )
    shift: int = Field(default=0, ge=0, description="pixels that crop shifts by at most; 0: an eighth of the picture")
    shift_fill: Literal["black", "reflect"] = Field(
        default="black", description="what a shift brings in; reflect: the picture's edge, mirrored"
    )
    mirror: Literal["random", "alternate"] = Field(
        default="random", description="when a picture is mirrored; alternate: in every second epoch"
    )
    validation: float = Field(
        default=0.1, gt=0.0, lt=1.0, description="share kept for evaluation where a folder has no val/ or test/"
    )
    held_out: str = Field(
        default="",
        description="a third data set, which decides nothing and is evaluated once at the end, as test: a folder of "
        "class folders, a data set's name or file.py:function; empty: test/ of a folder that has val/ too",
    )
    skip_corrupt: bool = Field(
        default=False,
        description="leave out pictures that can't be read, and train on another in the place of one that goes bad "
        "later; at most 10, or 0.1 %; an evaluation needs all of its pictures",
    )
    packed: bool = Field(
        default=True, description="read the packed copy beside a folder where it is there and up to date"
    )
    workers: int = Field(default=-1, ge=-1, le=256, description="decoding processes for each rank; -1: by the cores")
    machine_workers: int = Field(
        default=0, ge=0, le=1024, description="decoding processes for all ranks of a machine together; 0: see workers"
    )
    memory_limit_mib: int = Field(
        default=2048, ge=0, description="a set of equally sized pictures up to this size stays in memory, decoded"
    )
    train_samples: int = Field(default=0, ge=0, description="use so many training samples, spread evenly; 0: all")
    test_samples: int = Field(default=0, ge=0, description="use so many test samples, spread evenly; 0: all")
