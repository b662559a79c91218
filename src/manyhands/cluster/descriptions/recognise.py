"""Finds the format of a file that describes a cluster by its content, and reads it."""

from pathlib import Path
from types import ModuleType

from manyhands.cluster.descriptions.inventory import Cluster
from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TEXT_BYTES, decoded, read_bytes
from manyhands.core.plugins import load_choice, module_names

FORMATS = "manyhands.cluster.descriptions.formats"


def read_cluster(path: Path, wait_s: float = 0.0) -> Cluster:
    """Reads a cluster from a file in any known format; waits for one that is still being written. Raises UserError."""
    try:
        text = decoded(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", str(path), ("give the file's own path",)) from error
    except ValueError as error:
        hints = (f"known formats: {', '.join(readable_formats())}",)
        raise UserError(f"{path} describes no machines: {error}", str(path), hints) from error
    module = format_of(str(path), text)
    if wait_s and hasattr(module, "wait"):
        text = module.wait(path, wait_s)
    return module.read(text, str(path))


def format_of(path: str, text: str) -> ModuleType:
    """Returns the format that a text is in.

    Raises:
        UserError: No format fits; names those that were tried.
    """
    formats = readable_formats()
    for module in formats.values():
        if module.recognise(path, text):
            return module
    what = "this file is empty" if not text.strip() else "this file is in no known format"
    raise UserError(what, path, (f"tried: {', '.join(formats)}",))


def readable_formats() -> dict[str, ModuleType]:
    """The formats that files are read in, by name."""
    modules = {name: load_choice(FORMATS, name) for name in module_names(FORMATS)}
    return {name: module for name, module in modules.items() if hasattr(module, "recognise")}
