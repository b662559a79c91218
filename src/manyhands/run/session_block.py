"""What `manyhands.session()` gives before `with` has opened it."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.train.session import Session


class SessionBlock(AbstractContextManager["Session"]):
    """What `session` gives: the session itself is had by `with`, at whose end all processes leave it."""

    def __init__(self, block: "AbstractContextManager[Session]") -> None:
        self._block = block

    @override
    def __enter__(self) -> "Session":
        return self._block.__enter__()

    @override
    def __exit__(self, *ended: Any) -> bool | None:
        return self._block.__exit__(*ended)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UserError("the session is not open", f"session.{name}", ("write with manyhands.session() as here: …",))
