"""A port that the job names and that can't be used."""

from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    """Says who holds it, or who does not reach it, where that could be seen."""
    port = survey.needs.port
    return [
        DoctorFinding("port", "fail", (host,), f"port {port} of {host} can't be used: {error}",
                (f"choose another port, such as {port + 1}, or remove the port to use a free one",
                 "or end the process that uses the port"),
                f"port:{host}", ("collective",))
        for host, error in survey.port_errors.items()
    ]  # fmt: skip
