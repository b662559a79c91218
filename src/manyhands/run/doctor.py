"""Examines this machine, or all machines of a job, before anything is trained; changes nothing."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from manyhands.cluster.agents.assemble import AgentLinks, assembled, prepare
from manyhands.cluster.agents.ending import first_cause
from manyhands.cluster.agents.orders import Orders, orders_for
from manyhands.cluster.agents.protocol import MakeScratch
from manyhands.cluster.agents.ssh import reached_by
from manyhands.cluster.agents.store_tunnel import StoreTunnel, store_tunnel
from manyhands.cluster.agents.supervise import Watch, supervise
from manyhands.cluster.doctor.addresses import local_candidates
from manyhands.cluster.doctor.facts import gather
from manyhands.cluster.doctor.findings import AllReduceTest, DoctorFinding, Facts, Needs, Survey, examine, fails
from manyhands.cluster.doctor.probe import Listeners
from manyhands.cluster.doctor.questions import FactsWanted
from manyhands.cluster.doctor.survey import matrix, take_survey
from manyhands.cluster.hosts.inventory import Address, Machine, Rendezvous
from manyhands.cluster.hosts.machines import machines_of
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_DOCTOR, EXIT_OK, ManyhandsError
from manyhands.core.scratch import scratch
from manyhands.core.user_code import is_object_reference

# Machines that have just reached each other need no more for so little.
COLLECTIVE_S = 30.0
LISTENING = "for some seconds each machine listens on all its addresses and answers only connections with a token"
LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class Diagnosis:
    """What an examination found."""

    survey: Survey  # everything that was asked and tried
    findings: list[DoctorFinding]  # one for each cause, the worst first

    @property
    def exit_code(self) -> int:
        """3 where training would fail."""
        return EXIT_DOCTOR if fails(self.findings) else EXIT_OK

    def as_json(self) -> dict[str, Any]:
        """For scripts; a machine's single files are left out."""
        survey = self.survey
        facts = {host: dict(own) for host, own in survey.facts.items()}
        for own in facts.values():
            own["code"] = {name: value for name, value in own.get("code", {}).items() if name != "files"}
        return {
            "v": 1,
            "fails": fails(self.findings),
            "hosts": list(survey.hosts),
            "findings": [finding.as_json() for finding in self.findings],
            "addresses": {host: {"interface": i, "address": a} for host, (i, a) in survey.chosen.items()},
            "mbps": matrix(survey, survey.mbps),
            "latency_ms": matrix(survey, survey.latency_ms),
            "clock_s": {host: offset for host, (offset, _) in survey.clock_s.items()},
            "facts": facts,
        }


def diagnose(job: Job, say: Callable[[str], object] = lambda _line: None) -> Diagnosis:
    """Examines the machines that the job names, or this one alone.

    Args:
        job: what they shall do.
        say: told what is open on the machines meanwhile.

    Raises:
        UserError: the job names its machines in a way that can't be read.
    """
    machines = machines_of(job.cluster)
    survey = _survey_machines(job, machines, say) if machines else _survey_here(job)
    return Diagnosis(survey, examine(survey))


def facts_wanted(job: Job, *, torch: bool = False) -> FactsWanted:
    """What each machine is asked for beside the general facts; `torch`: what torch sees of its accelerators too."""
    workdir = "" if job.cluster.workdir else str(Path.cwd())
    runs = str(Path(job.run.out).parent) if job.run.out else ""
    return FactsWanted(workdir, runs, job.data.name, job.data.dir, torch)


def _needs(job: Job, machines: Sequence[Machine], facts: Mapping[str, Facts]) -> Needs:
    asked = {machine.name: machine.slots or job.cluster.processes for machine in machines}
    counts = {host: asked.get(host, 0) or len(own.get("accelerators", ())) or 1 for host, own in facts.items()}
    carried = not job.cluster.sync_code
    references = (job.data.name, job.data.held_out, job.model.name, *job.train.custom_code)
    return Needs(
        processes=counts,
        threads=job.cluster.threads,
        port=_rendezvous(job)[1],
        interface=job.cluster.interface,
        through_ssh=job.cluster.through_ssh,
        data=job.data.name,
        download=job.data.download,
        code=any(is_object_reference(word) for word in references) and carried,
        files=tuple(word.rpartition(":")[0] for word in references if is_object_reference(word)) if carried else (),
        device=job.cluster.device,
        reach={machine.name: reached_by(machine, job.cluster) for machine in machines},
    )


def _survey_here(job: Job) -> Survey:
    name = socket.gethostname()
    facts = {name: gather(facts_wanted(job, torch=job.cluster.device != "cpu"))}
    survey = Survey((name,), dict(facts), needs=_needs(job, [Machine(name, job.cluster.processes)], facts))
    address, port = _rendezvous(job)
    if address in local_candidates(facts[name]) or address in LOOPBACK:
        listeners = Listeners([address], port)
        listeners.close()
        if listeners.opened[0].error:
            survey.port_errors[name] = listeners.opened[0].trouble
    return survey


def _rendezvous(job: Job) -> tuple[str, int]:
    """The address and port where the job's processes are to meet, if it names one."""
    url = urlparse(job.cluster.init)
    return (url.hostname or "", url.port or 0) if url.scheme == "tcp" else ("", 0)


def _survey_machines(job: Job, machines: Sequence[Machine], say: Callable[[str], object]) -> Survey:
    if len(machines) > 1:
        say(LISTENING)
    with (
        scratch("doctor") as logs,
        assembled(machines, job.cluster, logs, facts_wanted(job, torch=job.cluster.device != "cpu")) as agents,
    ):
        survey = survey_agents(job, agents, machines)
        survey.collective = _add_up(job, agents, survey, say)
        return survey


def known_of(job: Job, machines: Sequence[Machine], facts: Mapping[str, Facts]) -> Survey:
    """What can be said of machines from their facts alone, with nothing tried between them."""
    return Survey(tuple(machine.name for machine in machines), dict(facts), needs=_needs(job, machines, facts))


def survey_agents(job: Job, agents: AgentLinks, machines: Sequence[Machine], *, measure: bool = True) -> Survey:
    """Tries out everything between the machines that answer; why the others don't is noted.

    Args:
        job: what they shall do.
        agents: the agents of those that answer.
        machines: all.
        measure: clocks and the speed of links too, which takes seconds.
    """
    names = [link.machine.name for link in agents.links]
    facts = dict(zip(names, agents.facts, strict=True))
    needs = _needs(job, machines, facts)
    survey = take_survey(agents.ask_some, facts, [machine.name for machine in machines], needs, measure=measure)
    survey.errors |= agents.contacts
    return survey


def _add_up(job: Job, agents: AgentLinks, survey: Survey, say: Callable[[str], object]) -> AllReduceTest:
    """A real all-reduce with one process on each machine, where nothing is known that would keep it from working."""
    alone = len(survey.hosts) < 2
    if alone or survey.errors or set(survey.chosen) != set(survey.hosts) or fails(examine(survey)):
        return AllReduceTest("skipped")
    with store_tunnel(job.cluster) as way:
        try:
            orders = _orders(job, agents, survey, way)
        except ManyhandsError as error:
            return AllReduceTest("failed", error.message)
        met = orders[0].rendezvous
        store = "" if met.address == LOOPBACK[0] else f"port {met.port} of {met.address} and "
        where = ", ".join(survey.chosen[host][1] for host in survey.hosts)
        say(f"during the all-reduce test {store}a free port on each of {where} are open, without a password")
        ending = supervise(agents.links, orders, Watch())
    if ending.ok:
        return AllReduceTest("ok", seconds=max(answer["seconds"] for answer in ending.returned.values()))
    cause = first_cause(ending)
    said = cause.what if cause else ending.broken.strip().rpartition("\n")[2]
    return AllReduceTest("failed", said, missing=tuple(ending.lost))


def _orders(job: Job, agents: AgentLinks, survey: Survey, way: StoreTunnel) -> list[Orders]:
    """One process for each machine; what they write goes into a folder that goes with the agent."""
    _, devices = prepare(agents, [1] * len(agents.links), job.cluster)
    addresses = [Address(*survey.chosen[host]) for host in survey.hosts]
    places = way.open(agents, addresses)
    answers = agents.ask_each(MakeScratch(), COLLECTIVE_S)
    limits = {"join_timeout_s": COLLECTIVE_S, "collective_timeout_s": COLLECTIVE_S, "threads": 1}
    quick = job.model_copy(update={"cluster": job.cluster.model_copy(update=limits)})
    return [
        orders_for(
            quick,
            "add-up",
            answer.folder,
            Rendezvous((1,) * len(answers), machine, *places.ends[machine]),
            device=devices[machine],
            environment=addresses[machine].environment(),
        )
        for machine, answer in enumerate(answers)
    ]
