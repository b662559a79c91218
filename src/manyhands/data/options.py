"""The [data] section of a job."""

from typing import Literal

from pydantic import Field

from manyhands.core.options import Options


class DataOptions(Options):
    """The data set and the preprocessing."""

    name: str = Field(default="digits", description="a data set's name, a folder, or file.py:function")
    dir: str = Field(default="", description="folder of named data sets; empty: the user's cache folder")
    download: bool = Field(default=True, description="download a named data set that is missing")
    image_size: int = Field(default=0, ge=0, le=4096, description="picture size in pixels; 0: from data set or model")
    channels: Literal[0, 1, 3] = Field(default=0, description="channels of a picture; 0: from data set or model")
    mean: tuple[float, ...] = Field(
        default=(), description="mean per channel, for pixels in [0, 1]; empty: the data set's"
    )
    std: tuple[float, ...] = Field(
        default=(), description="standard deviation per channel, for pixels in [0, 1]; empty: the data set's"
    )
    augment: Literal["auto", "none", "crop", "crop-flip", "resized-crop-flip"] = Field(
        default="auto",
        description="crop: shift; crop-flip: shift and mirror; resized-crop-flip: as for ImageNet; auto: the recipe's",
    )
    shift: int = Field(default=0, ge=0, description="largest shift of crop in pixels; 0: an eighth of the picture")
    shift_fill: Literal["black", "reflect"] = Field(
        default="black", description="pixels that fill the border after a shift; reflect: the picture's edge, mirrored"
    )
    mirror: Literal["random", "alternate"] = Field(
        default="random", description="random: mirror by chance; alternate: mirror each picture in every second epoch"
    )
    validation: float = Field(
        default=0.1, gt=0.0, lt=1.0, description="share of the pictures for evaluation if a folder has no val/ or test/"
    )
    held_out: str = Field(
        default="",
        description="data set for one evaluation at the end, without influence on training: a folder of "
        "class folders, a data set's name or file.py:function; empty: test/ of a folder that also has val/",
    )
    skip_corrupt: bool = Field(
        default=False,
        description="leave out pictures that are unreadable at the start; replace training pictures that become "
        "unreadable later by others (at most 10, or 0.1 %); evaluation never replaces pictures",
    )
    packed: bool = Field(default=True, description="read the packed copy beside a folder if the copy is up to date")
    workers: int = Field(default=-1, ge=-1, le=256, description="decoding processes per rank; -1: depends on the cores")
    machine_workers: int = Field(
        default=0, ge=0, le=1024, description="decoding processes per machine, for all of its ranks; 0: as workers says"
    )
    memory_limit_mib: int = Field(
        default=2048, ge=0, description="keep decoded pictures of one size in memory if they take at most this many MiB"
    )
    train_samples: int = Field(
        default=0, ge=0, description="use only this many training samples, at even intervals; 0: all"
    )
    test_samples: int = Field(default=0, ge=0, description="use only this many test samples, at even intervals; 0: all")
