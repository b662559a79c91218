"""Machines that could not be asked at all."""

from manyhands.cluster.findings import Finding, Survey


def run(survey: Survey) -> list[Finding]:
    """One finding for each machine without an answer; whatever else fails for lack of it is explained."""
    return [
        Finding("contact", "fail", (host,), contact.what, contact.mend, f"contact:{host}", ("collective",))
        for host, contact in survey.errors.items()
    ]
