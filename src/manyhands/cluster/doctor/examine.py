"""From what was found out to what is said: every check, one finding for each cause, the worst first."""

from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey
from manyhands.core.choices import load_choice, module_names

CHECKS = "manyhands.cluster.doctor.checks"
WORST_FIRST: tuple[Severity, ...] = ("fail", "warn", "ok")
# Among equally bad ones, what must be mended before the rest can be seen.
ORDER = ("contact", "twice", "reach", "interface", "port", "accelerators", "versions", "data", "code", "memory", "disk",
         "collective", "links", "names", "jobs", "cpu", "clock", "facts")  # fmt: skip


def examine(survey: Survey) -> list[DoctorFinding]:
    found = [finding for name in module_names(CHECKS) for finding in load_choice(CHECKS, name).run(survey)]
    return sort_out(found)


def sort_out(found: list[DoctorFinding]) -> list[DoctorFinding]:
    """Leaves one finding for each cause, none that another one explains, and the worst first."""
    found = sorted(found, key=_weight)
    explained = {cause for finding in found if finding.severity != "ok" for cause in finding.explains}
    kept: dict[str, DoctorFinding] = {}
    for finding in found:
        cause = finding.cause or f"{finding.check}:{finding.what}"
        if cause not in explained:
            kept.setdefault(cause, finding)
    return list(kept.values())


def fails(found: list[DoctorFinding]) -> bool:
    return any(finding.severity == "fail" for finding in found)


def _weight(finding: DoctorFinding) -> tuple[int, int]:
    place = ORDER.index(finding.check) if finding.check in ORDER else len(ORDER)
    return WORST_FIRST.index(finding.severity), place
