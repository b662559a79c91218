"""The user's own data sets, wrapped."""

from typing import Any

from manyhands.core.errors import UserError
from manyhands.data.options import DataOptions
from manyhands.data.splits import Splits


def splits_of_objects(train: Any, test: Any | None, options: DataOptions) -> Splits:
    """Not written yet."""
    raise UserError("the user's own data sets can't be opened yet", "", ())
