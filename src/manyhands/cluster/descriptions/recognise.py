"""Finds the format that a description of a cluster is in, by its content, and reads it."""

from pathlib import Path
from types import ModuleType

from manyhands.cluster.descriptions.inventory import Cluster
from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TEXT_BYTES, UnreadableError, decoded, read_bytes
from manyhands.core.plugins import load_choice, module_names, unknown_choice

FORMATS = "manyhands.cluster.descriptions.formats"


def read_cluster(path: Path, wait_s: float = 0.0) -> Cluster:
    """Reads a cluster from a file in any known format; waits for one that is still being written. Raises UserError."""
    text = read_text(path)
    module = format_of(str(path), text)
    if wait_s and hasattr(module, "wait"):
        text = module.wait(path, wait_s)
    return module.read(text, str(path))


def read_text(path: Path) -> str:
    """A description's text. Raises UserError: it can't be read, or is not text."""
    try:
        content = read_bytes(path, MOST_TEXT_BYTES, pipes=True)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", str(path), ("give the file's own path",)) from error
    except ValueError as error:
        raise _no_description(str(path), error) from error
    return text_from(content, str(path))


def text_from(content: bytes, where: str) -> str:
    """The text of a description's bytes. Raises UserError: it is not text, or longer than any description."""
    try:
        if len(content) > MOST_TEXT_BYTES:
            raise UnreadableError(f"it is larger than {MOST_TEXT_BYTES >> 20} MiB")
        return decoded(content)
    except ValueError as error:
        raise _no_description(where, error) from error


def _no_description(where: str, error: ValueError) -> UserError:
    mend = (f"known formats: {', '.join(names('read'))}",)
    return UserError(f"{where} describes no machines: {error}", where, mend)


def format_of(path: str, text: str) -> ModuleType:
    """The format that a text is in. Raises UserError: none fits; what was tried is listed."""
    tried: list[str] = []
    for name in module_names(FORMATS):
        module = load_choice(FORMATS, name)
        if hasattr(module, "read") and hasattr(module, "recognise"):
            if module.recognise(path, text):
                return module
            tried.append(_name(module))
    what = "this file is empty" if not text.strip() else "this file is in no known format"
    raise UserError(what, path, (f"tried: {', '.join(tried)}", "--from NAME says which it is"))


def format_named(word: str, ability: str = "read", where: str = "") -> ModuleType:
    """The format that a user's word names; `ability` is "read" or "write". Raises UserError: none, or it can't."""
    modules = [load_choice(FORMATS, name) for name in module_names(FORMATS)]
    wanted = [module for module in modules if word in getattr(module, "NAMES", ())]
    if not wanted:
        raise unknown_choice("format", word, names(ability), where)
    if not hasattr(wanted[0], ability):
        what = f"a cluster can't be {'read from' if ability == 'read' else 'written as'} {word}"
        raise UserError(what, where, (f"known: {', '.join(names(ability))}",))
    return wanted[0]


def names(ability: str) -> list[str]:
    """The formats that can be read, or written; one name of each."""
    modules = [load_choice(FORMATS, name) for name in module_names(FORMATS)]
    return [_name(module) for module in modules if hasattr(module, ability) and hasattr(module, "NAMES")]


def _name(module: ModuleType) -> str:
    return module.NAMES[0]
