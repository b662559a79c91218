"""What of manyhands is open to whom: on each machine now, and once a job runs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from manyhands.cluster.agents.agent import Agent
from manyhands.cluster.agents.assemble import assembled
from manyhands.cluster.doctor.exposure import OpenPort, open_ports
from manyhands.cluster.hosts.machines import machines_of
from manyhands.cluster.messages import call
from manyhands.config.job import Job
from manyhands.core.scratch import scratch
from manyhands.run.doctor import LISTENING, facts_wanted, survey_agents
from manyhands.run.preflight import public_addresses

HERE = "this machine"
ALONE = "train, fit and session open ports on loopback only, for users of this machine"


@dataclass(frozen=True)
class Exposure:
    """What is open to whom."""

    now: dict[str, tuple[OpenPort, ...]]  # of each machine, what listens
    why_not: dict[str, str]  # of a machine that couldn't be asked, why
    then: tuple[str, ...]  # what a job would open, a line each

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        now = {host: [asdict(port) for port in ports] for host, ports in self.now.items()}
        return {"v": 1, "open": now, "errors": self.why_not, "then": list(self.then)}

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{host}: {what}" for host, what in self.why_not.items()]
        for host, ports in self.now.items():
            found += [f"{host}: {_describe(port)}" for port in ports] or [f"{host}: manyhands has no open port"]
        return [*found, "a job would open:", *(f"  {line}" for line in self.then)]


def exposure(job: Job, say: Callable[[str], object]) -> Exposure:
    """Asks the machines that the job names, or this one.

    Args:
        job: what would run.
        say: told what is open on the machines meanwhile.
    """
    machines = machines_of(job.cluster)
    if not machines:
        return Exposure({HERE: open_ports()}, {}, (ALONE,))
    with scratch("doctor") as logs, assembled(machines, job.cluster, logs, facts_wanted(job)) as agents:
        names = [link.machine.name for link in agents.links]
        ports = dict(zip(names, agents.ask_each(call(Agent.open_ports)), strict=True))
        if len(machines) > 1:
            say(LISTENING)
        survey = survey_agents(job, agents, machines, measure=False)
        why_not = {host: contact.what for host, contact in agents.contacts.items()}
        return Exposure(ports, why_not, _then(job, survey.hosts, survey.chosen))


def _then(job: Job, hosts: tuple[str, ...], chosen: dict[str, tuple[str, str]]) -> tuple[str, ...]:
    through_ssh = job.cluster.through_ssh or (public_addresses(chosen) and not job.cluster.interface)
    if len(hosts) == 1 or through_ssh or len(chosen) < len(hosts):
        return ("ports on loopback only, for users of the machines; traffic between machines goes through ssh",)
    return (
        f"{hosts[0]}: the store, on loopback; other machines: a loopback port that ssh forwards to the store",
        *(f"{host}: a free port of {address} ({interface}) for each process and group, open to every host during the "
          "rendezvous, then closed to new connections (with NCCL, or without Linux: open until the run ends)"
          for host, (interface, address) in chosen.items()),
        "traffic between these addresses is not encrypted; use --interface ssh to encrypt all traffic",
    )  # fmt: skip


def _describe(port: OpenPort) -> str:
    where = f"process {port.pid} listens on {port.address} port {port.port}"
    if not port.lets_in:
        return f"{where}, closed to new connections"
    address = ip_address(port.address)
    if address.is_loopback:
        return f"{where}, open to users of the machine"
    return f"{where}, open to every host that reaches {'the machine' if address.is_unspecified else 'the address'}"
