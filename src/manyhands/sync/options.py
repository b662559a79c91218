"""The [sync] section of a job: what all methods have in common, and the options of each method's own."""

from typing import TYPE_CHECKING, Literal

from pydantic import create_model

from manyhands.core.options import Options, option
from manyhands.sync.method import methods

# Has the link decide.
AUTO = "auto"


def _names() -> str:
    *most, last = methods()
    return f"{AUTO}, {', '.join(most)} or {last}"


class CommonOptions(Options):
    """Options of gradient synchronization."""

    method: str = option("allreduce", f"gradient synchronization: {_names()}; {AUTO}: chosen by network speed")
    within: Literal["auto", "machine", "process"] = option(
        "auto",
        "which processes communicate over the network; process: every process; machine: one process per machine, "
        "after averaging within the machine; auto: machine if there are several machines, else process",
    )
    link: str = option("", "bandwidth between machines, such as 10mbit; empty: measured")

    @property
    def is_auto(self) -> bool:
        """True where the link decides which method is taken."""
        return self.method == AUTO


def _sections() -> list[type[Options]]:
    """The options of each method that has some. Raises TypeError: two methods have one name for different options."""
    found: list[type[Options]] = []
    for name, method in methods().items():
        section = getattr(method, "Options", None)
        if section is None or not issubclass(section, Options) or section is Options:
            continue
        for key, field in section.model_fields.items():
            others = [one for one in (*found, CommonOptions) if key in one.model_fields]
            if any(repr(one.model_fields[key]) != repr(field) for one in others):
                raise TypeError(f"the sync method {name} defines the option {key} differently than another method")
        found.append(section)
    return found


if TYPE_CHECKING:
    SyncOptions = CommonOptions  # a method's own options are nobody else's business
else:
    SyncOptions = create_model(
        "SyncOptions", __base__=(*_sections(), CommonOptions), __doc__=CommonOptions.__doc__, __module__=__name__
    )
