"""The user's data: a folder of class folders, or a function "file.py:function" that returns (train, test) or Splits."""

from pathlib import Path

from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.user_code import is_object_reference, load_object, user_line
from manyhands.data.gallery import open_folder
from manyhands.data.options import DataOptions
from manyhands.data.samples import splits_of_objects
from manyhands.data.splits import Splits

NAMES: tuple[str, ...] = ()


def open(name: str, options: DataOptions) -> Splits:  # noqa: A001
    """Opens a folder or calls the user's function. Raises UserError if that fails or the result has a wrong type."""
    if not is_object_reference(name):
        return open_folder(Path(name).expanduser(), options)
    function = load_object(name, "data.name")
    hints = ("return (train, test): two torch data sets; test may be None",)
    if not callable(function):
        raise UserError(f"{name} is a {type(function).__name__}, not a function", "data.name", hints)
    try:
        made = function()
    except ManyhandsError:
        raise
    except Exception as error:
        where = user_line(error) or "data.name"
        raise UserError(f"{name} failed: {type(error).__name__}: {error}", where) from error
    if isinstance(made, Splits):
        return made
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UserError(f"{name} returned a {type(made).__name__}, not a pair", "data.name", hints)
    return splits_of_objects(made[0], made[1], options, title=name)
