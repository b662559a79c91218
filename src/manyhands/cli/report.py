"""manyhands report."""

from typing import Annotated

from cyclopts import Parameter

from manyhands.core.shown import show


def report(run: Annotated[str, Parameter(help="a run's folder, a part of its name, or last")], /) -> int:
    """Write a run's report.html and its pictures anew; also for a run that is going on or broke."""
    from manyhands.report.page import write_report
    from manyhands.run.find import find_reference

    show(str(write_report(find_reference(run))))
    return 0
