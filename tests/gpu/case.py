"""One case, in the process of its own that `python -m tests.gpu` starts: case NAME DEVICE ANSWER LIMIT."""

import faulthandler
import json
import sys
import traceback
from pathlib import Path


class Skip(Exception):  # noqa: N818 - no error
    """This machine can't show it."""


class Unproven(Exception):  # noqa: N818 - no error
    """Nothing has shown it yet: it needs what hardly any machine has."""


def answer(cases, name, device, path, limit_s):
    """Runs one of `cases`, writes what it gives, and ends this process by how it went."""
    # Shortly before whoever started this ends it.
    faulthandler.dump_traceback_later(max(1.0, float(limit_s) - 4))
    code, found = 0, {}
    try:
        found = {"figures": getattr(cases, name)(device)}
    except Skip as why:
        code, found = 3, {"said": str(why)}
    except Unproven as why:
        code, found = 4, {"said": str(why)}
    except BaseException:  # noqa: BLE001 - the output describes it
        traceback.print_exc()
        code = 1
    Path(path).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    # Not this module's own, which goes by another name: the exceptions are one class each.
    from tests.gpu import case, cases

    case.answer(cases, *sys.argv[1:])
