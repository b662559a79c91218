"""manyhands report."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.terminal import show


def report(run: Annotated[str, Parameter(help="a run's folder, part of its name, or last")], /) -> int:
    """Write the report.html of a run and its pictures again; the run may be active or have failed."""
    from manyhands.report.page import write_report
    from manyhands.run.find import find_reference

    show(str(write_report(find_reference(run))))
    return 0
