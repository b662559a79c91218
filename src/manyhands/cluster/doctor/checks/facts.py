"""What a machine could not find out about itself."""

from manyhands.cluster.doctor.compare import fact
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """One finding for each kind of fact, since it is likely missing everywhere for one reason."""
    missing: dict[str, dict[str, str]] = {}
    for host, errors in fact(survey, "errors").items():
        for name, error in errors.items():
            if name != "accelerators":  # a driver that fails has a check of its own
                missing.setdefault(name, {})[host] = error
    return [
        DoctorFinding(
            "facts", "warn", tuple(errors),
            f"can't determine the {name.replace('_', ' ')} of {', '.join(errors)}: {next(iter(errors.values()))}",
            cause=f"facts:{name}",
        )
        for name, errors in missing.items()
    ]  # fmt: skip
