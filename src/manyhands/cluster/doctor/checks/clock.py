"""Clocks that are apart."""

import math
import statistics

from manyhands.cluster.doctor.compare import on_host, who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey

APART_S = 1.0


def run(survey: Survey) -> list[DoctorFinding]:
    """Names those that are far from the median, beyond what the question's own way leaves uncertain."""
    if len(survey.clock_s) < 2:
        return []
    middle = statistics.median_low([offset for offset, _ in survey.clock_s.values()])
    far = {
        host: offset - middle
        for host, (offset, uncertain) in survey.clock_s.items()
        if abs(offset - middle) - uncertain > APART_S
    }
    if not far:
        apart = max(abs(offset - middle) for offset, _ in survey.clock_s.values())
        what = f"clocks are within {math.ceil(apart * 1000)} ms"
        return [DoctorFinding("clock", "ok", tuple(survey.clock_s), what, cause="clock")]
    shown = ", ".join(f"{host} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for host, by in far.items())
    others = who(host for host in survey.clock_s if host not in far)
    what = f"clocks differ: {shown} of {others}; times in logs will not match, and certificates may be refused"
    hints = tuple(f"synchronise the clock: {on_host(survey, host, 'sudo timedatectl set-ntp true')}" for host in far)
    return [DoctorFinding("clock", "warn", tuple(far), what, hints, "clock")]
