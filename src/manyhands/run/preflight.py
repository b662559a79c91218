"""Whether the machines of a job can do it, as far as can be seen before it begins or a machine joins it."""

from collections.abc import Callable, Mapping
from ipaddress import ip_address

from manyhands.cluster.agents.assemble import AgentLinks
from manyhands.cluster.doctor.findings import DoctorFinding, Facts, examine
from manyhands.cluster.hosts.inventory import Address, Machine
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_DOCTOR, RunError
from manyhands.run.doctor import known_of, survey_agents
from manyhands.run.pending import RefusedError
from manyhands.run.train import LOOPBACK

# What the doctor would say, and the next minute may change.
MOMENTARY = {"cpu", "jobs"}


def check_machines(job: Job, say: Callable[[str, str], object], agents: AgentLinks) -> list[Address]:
    """What the doctor sees without measuring anything, and the addresses that all machines reach each other at.

    There are none where the machines are to be joined through ssh, or nothing else joins them.

    Raises:
        RunError: training would fail; what the doctor found is in it.
    """
    if len(agents.links) == 1:
        return [Address("", LOOPBACK)]
    survey = survey_agents(job, agents, [link.machine for link in agents.links], measure=False)
    found = examine(survey)
    worst = _fails(found)
    apart = bool(worst) and all(finding.check == "reach" for finding in worst)
    public = public_addresses(survey.chosen)
    allowed = not job.cluster.interface or (apart and job.cluster.relay)
    through_ssh = job.cluster.through_ssh or (bool(apart or public) and allowed)
    if apart and through_ssh:
        say(f"{worst[0].what}: trying ssh between the machines", "INFO")
    elif worst:
        others = [f"also: {finding.what}" for finding in worst[1:]]
        error = RunError(worst[0].what, ", ".join(worst[0].hosts), (*worst[0].hints, *others))
        error.exit_code = EXIT_DOCTOR
        raise error
    if public and through_ssh and not job.cluster.through_ssh:
        say(f"{public}: connecting through ssh; to connect unencrypted, use --interface NAME", "INFO")
    for finding in found:
        if finding.severity == "warn" and finding.check not in MOMENTARY:
            say(finding.what, "WARNING")
    return [] if through_ssh else [Address(*survey.chosen[link.machine.name]) for link in agents.links]


def public_addresses(chosen: Mapping[str, tuple[str, str]]) -> str:
    """Says which machines reach each other only at addresses of the Internet; nothing where none do."""
    public = [f"{name} at {address}" for name, (_, address) in chosen.items() if ip_address(address).is_global]
    return f"only the Internet connects the machines ({', '.join(public)})" if public else ""


def judge(job: Job, agents: AgentLinks, machine: Machine, facts: Facts) -> None:
    """Compares what a machine says of itself with what is known of those that take part.

    Raises:
        RefusedError: training with it would fail.
    """
    known = {link.machine.name: own for link, own in zip(agents.links, agents.facts, strict=True) if not link.closed}
    machines = [*(link.machine for link in agents.links if not link.closed), machine]
    if worst := _fails(examine(known_of(job, machines, {**known, machine.name: facts}))):
        raise RefusedError(worst[0].what, machine.name, worst[0].hints)


def _fails(found: list[DoctorFinding]) -> list[DoctorFinding]:
    return [finding for finding in found if finding.severity == "fail"]
