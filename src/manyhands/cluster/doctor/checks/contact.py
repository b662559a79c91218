"""Machines that could not be asked at all."""

from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """One finding for each machine without an answer; whatever else fails for lack of it is explained."""
    return [
        DoctorFinding("contact", "fail", (host,), contact.what, contact.hints, f"contact:{host}", ("collective",))
        for host, contact in survey.errors.items()
    ]
