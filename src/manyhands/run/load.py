"""The one way from the head's programs to what computes with tensors."""

import importlib
from typing import Any


def load_worker(module: str) -> Any:
    """A module of `manyhands.worker`, imported now: torch, which takes a second, may come with it."""
    return importlib.import_module(f"manyhands.worker.{module}")
