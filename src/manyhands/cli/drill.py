"""manyhands drill."""

import signal
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.cli.flags import AsJson
from manyhands.core.errors import EXIT_FAILED, EXIT_OK
from manyhands.core.shown import say, show, show_json


def drill(
    *run_options: Annotated[str, Parameter(allow_leading_hyphen=True, help="as manyhands train takes them")],
    faults: Annotated[str, Parameter(help="which, by name, with commas between; default: all")] = "",
    seed: Annotated[int, Parameter(help="decides when each fault comes, and to which process")] = 7,
    keep: Annotated[
        Path | None, Parameter(help="a new folder for all runs of the drill; default: none is kept")
    ] = None,
    list_: Annotated[bool, Parameter(name="--list", negative="", help="say which faults there are; try none")] = False,
    as_json: AsJson = False,
) -> int:
    """Try faults on a run, and say of each whether the run came through as promised; your own runs aren't touched.

    manyhands drill                             digits on two processes, all faults that can be tried here
    manyhands drill cifar10 resnet18 --epochs 1 --faults kill-rank,disk-full
    """
    from manyhands.run.drill import Verdict, chosen_faults, table_of
    from manyhands.run.drill import drill as tried

    chosen = chosen_faults(faults)
    if list_:
        show([f"{fault.row:>2}  {fault.name:<20}  {fault.does}: {fault.expected}" for fault in chosen])
        return EXIT_OK
    # As Ctrl-C does, it lets what was started and made be taken away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    verdicts: list[Verdict] = []
    for verdict in tried(run_options, chosen, seed, say, keep):
        say(f"  {verdict.told}")
        verdicts.append(verdict)
    if as_json:
        show_json({"faults": [verdict.as_object() for verdict in verdicts]})
    else:
        show(table_of(verdicts))
    return EXIT_FAILED if any(verdict.wrong for verdict in verdicts) else EXIT_OK
