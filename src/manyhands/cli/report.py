"""manyhands report."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(run: Annotated[Path, Parameter(help="a run folder")], /) -> int:
    """Write a run's report.html and its pictures anew; also for a run that is going on or broke."""
    from manyhands.report.page import write_report

    print(write_report(run))
    return 0
