"""manyhands why."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import AsJson
from manyhands.core.terminal import show, show_json


def why(
    run: Annotated[str, Parameter(help="a run's folder, part of its name, or last")], /, *, as_json: AsJson = False
) -> int:
    """Explain why a run ended, or show its progress: rank, machine, step and file; what was and can be done."""
    from manyhands.run.why import why as find_why

    found = find_why(run)
    if as_json:
        show_json(asdict(found))
    else:
        show(found.lines())
    return 0
