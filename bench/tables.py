"""What was measured, for people, and as JSON."""

import json
import os
import statistics
from pathlib import Path


def ratios(values, name, other):
    """Value of one to the other's, round by round."""
    pairs = zip(values.get(name, []), values.get(other, []), strict=False)
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def table(values, missing, unit, mine="manyhands"):
    lines = [f"{unit:<14} {'median':>9} {'min':>9} {'max':>9}   {mine} : it (median; each round)"]
    measured = {name: [value for value in found if value] for name, found in values.items()}
    for name, found in sorted(measured.items(), key=lambda item: -statistics.median(item[1] or [0])):
        if not found:
            lines.append(f"{name:<14} failed")
            continue
        numbers = (statistics.median(found), min(found), max(found))
        shown = " ".join(f"{n:>9,.0f}" if n > 100 else f"{n:>9.2f}" for n in numbers)
        rounds = ratios(values, mine, name) if name != mine else []
        beside = f"{statistics.median(rounds):.2f}  ({', '.join(f'{r:.2f}' for r in rounds)})" if rounds else ""
        lines.append(f"{name:<14} {shown}   {beside}")
    lines += [f"{name:<14} {reason}" for name, reason in missing.items()]
    return "\n".join(lines)


def keep(path, values, unit, **more):
    """Writes what was measured: values by name and round, and what else there is to say."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"unit": unit, "cores": os.cpu_count(), "load": os.getloadavg(), "values": values, **more}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
