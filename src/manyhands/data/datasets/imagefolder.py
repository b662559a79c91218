"""Folders of class folders, with or without train/ and val/, such as ImageNet."""

from pathlib import Path

from manyhands.data.gallery import open_folder
from manyhands.data.options import DataOptions
from manyhands.data.splits import Splits

NAMES: tuple[str, ...] = ()


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    return open_folder(Path(name).expanduser(), options)
