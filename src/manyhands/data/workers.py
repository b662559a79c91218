"""Decodes pictures in worker processes."""

from typing import Any

from manyhands.core.errors import UserError


class WorkerFeed:
    """Not written yet."""

    def __init__(self, source: Any, pixels: Any, **options: Any) -> None:
        """Refuses."""
        raise UserError("pictures in files can't be loaded yet")

    def batches(self, epoch: int, requests: Any) -> Any:
        """Not written yet."""

    def close(self) -> None:
        """Nothing to end."""
