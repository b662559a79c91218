"""Checks this machine, or all machines of a job, before training: predicts failures and lists open ports."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from manyhands.cluster.agents import agent, connection, ssh, supervise
from manyhands.cluster.agents.machines import Machines, prepare_machines, started_agents
from manyhands.cluster.agents.open_tunnels import StoreTunnel
from manyhands.cluster.agents.protocol import Orders, orders_for
from manyhands.cluster.doctor.facts import gather_facts
from manyhands.cluster.doctor.findings import DoctorFinding, FactsWanted, Needs, Survey, any_failed, examine, join_hosts
from manyhands.cluster.doctor.probe import OpenPort, Probe
from manyhands.cluster.doctor.survey import local_candidates, take_survey
from manyhands.cluster.failures import first_cause
from manyhands.cluster.hosts.inventory import LOOPBACK, Address, Machine, Rendezvous
from manyhands.cluster.hosts.this_process import machines_of
from manyhands.cluster.messages import call
from manyhands.config.job import Job
from manyhands.core.errors import EXIT_DOCTOR, EXIT_OK, ManyhandsError
from manyhands.core.scratch import scratch
from manyhands.core.user_code import is_object_reference

COLLECTIVE_S = 30.0  # the all-reduce test is short, and the machines have just connected
LISTENING = "for a few seconds, each machine listens on all its addresses; connections need a secret token"


@dataclass(frozen=True)
class Diagnosis:
    """The result of the doctor's checks."""

    survey: Survey  # all facts and test results
    findings: list[DoctorFinding]  # one for each cause, the worst first

    @property
    def exit_code(self) -> int:
        """The exit code of the command doctor: 3 if training would fail, otherwise 0."""
        return EXIT_DOCTOR if any_failed(self.findings) else EXIT_OK

    def as_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON-compatible data, without the machines' lists of code files."""
        survey, facts = self.survey, {host: dict(own) for host, own in self.survey.facts.items()}
        for own in facts.values():
            own["code"] = {name: value for name, value in own.get("code", {}).items() if name != "files"}
        return {
            "v": 1, "fails": any_failed(self.findings), "hosts": list(survey.hosts),
            "findings": [asdict(finding) for finding in self.findings],
            "addresses": {host: {"interface": i, "address": a} for host, (i, a) in survey.chosen.items()},
            "mbps": _nest_pairs(survey.mbps), "latency_ms": _nest_pairs(survey.latency_ms),
            "clock_s": {host: offset for host, (offset, _) in survey.clock_s.items()}, "facts": facts,
        }  # fmt: skip


def _nest_pairs(values: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (one, two), value in values.items():
        found.setdefault(one, {})[two] = value
    return found


def diagnose(job: Job, say: Callable[[str], object]) -> Diagnosis:
    """Checks the job's machines, or this machine if the job names none; reports opened ports with `say`."""
    machines, wanted = machines_of(job.cluster), facts_wanted(job, torch=job.cluster.device != "cpu")
    if not machines:
        survey = _survey_this_machine(job, wanted)
        return Diagnosis(survey, examine(survey))
    if len(machines) > 1:
        say(LISTENING)
    with scratch("doctor") as logs, started_agents(machines, job.cluster, logs, wanted) as agents:
        survey = survey_agents(job, agents, machines)
        survey.collective = _test_all_reduce(job, agents, survey, say)
    return Diagnosis(survey, examine(survey))


@dataclass(frozen=True)
class Exposure:
    """The ports that manyhands has open on each machine, and the ports that a job would open."""

    now: dict[str, tuple[OpenPort, ...]]  # ports that manyhands has open now, by machine
    why_not: dict[str, str]  # error message for each machine that couldn't be asked, by machine
    then: tuple[str, ...]  # a line for each kind of port that the job would open

    def as_json(self) -> dict[str, Any]:
        now = {host: [asdict(port) for port in ports] for host, ports in self.now.items()}
        return {"v": 1, "open": now, "errors": self.why_not, "then": list(self.then)}

    def lines(self) -> list[str]:
        found = [f"{host}: {what}" for host, what in self.why_not.items()]
        for host, ports in self.now.items():
            found += [f"{host}: {_describe_port(port)}" for port in ports] or [f"{host}: manyhands has no open port"]
        return [*found, "a job would open:", *(f"  {line}" for line in self.then)]


def exposure(job: Job, say: Callable[[str], object]) -> Exposure:
    """Lists open ports of manyhands and the ports that the job would open, on its machines or this one."""
    machines = machines_of(job.cluster)
    if not machines:
        then = "train, fit and session open ports on loopback only, for users of this machine"
        return Exposure({"this machine": Probe().open_ports()}, {}, (then,))
    with scratch("doctor") as logs, started_agents(machines, job.cluster, logs, facts_wanted(job)) as agents:
        ports = {machine.name: found for machine, found in agents.ask_each(call(agent.Agent.open_ports)).items()}
        if len(machines) > 1:
            say(LISTENING)
        survey = survey_agents(job, agents, machines, measure=False)
        why_not = {host: problem.message for host, problem in agents.problems.items()}
    return Exposure(ports, why_not, tuple(_ports_of_job(job, survey)))


def _ports_of_job(job: Job, survey: Survey) -> Iterator[str]:
    hosts, chosen = survey.hosts, survey.chosen
    through_ssh = job.cluster.through_ssh or (describe_public_addresses(chosen) and not job.cluster.interface)
    if len(hosts) == 1 or through_ssh or len(chosen) < len(hosts):
        yield "ports on loopback only, for users of the machines; traffic between machines goes through ssh"
        return
    closed = "then closed to new connections (with NCCL or on systems other than Linux: until the run ends)"
    yield f"{hosts[0]}: the store, on loopback; other machines: a loopback port that ssh forwards to the store"
    for host, (interface, address) in chosen.items():
        each = f"for each process and group, open to every host during the rendezvous, {closed}"
        yield f"{host}: a free port of {address} ({interface}) {each}"
    yield "traffic between these addresses is not encrypted; use --interface ssh to encrypt all traffic"


def _describe_port(port: OpenPort) -> str:
    where = f"process {port.pid} listens on {port.address} port {port.port}"
    if not port.lets_in:
        return f"{where}, closed to new connections"
    address = ip_address(port.address)
    if address.is_loopback:
        return f"{where}, open to users of the machine"
    return f"{where}, open to every host that reaches {'the machine' if address.is_unspecified else 'the address'}"


def describe_public_addresses(chosen: Mapping[str, tuple[str, str]]) -> str:
    """Returns the clause "only the Internet connects the machines (…)"; "" if all addresses are private."""
    public = [f"{name} at {address}" for name, (_, address) in chosen.items() if ip_address(address).is_global]
    return f"only the Internet connects the machines ({', '.join(public)})" if public else ""


def facts_wanted(job: Job, *, torch: bool = False) -> FactsWanted:
    """Returns the request for the facts that the doctor's checks use. `torch` asks torch for accelerators too."""
    workdir = "" if job.cluster.workdir else str(Path.cwd())
    runs = str(Path(job.run.out).parent) if job.run.out else ""
    return FactsWanted(workdir, runs, job.data.name, job.data.dir, torch)


def untested_survey(job: Job, machines: Sequence[Machine], facts: Mapping[str, Any]) -> Survey:
    """Returns a survey with the job's requirements and the machines' facts, without tests of connections."""
    asked = {machine.name: machine.slots or job.cluster.processes for machine in machines}
    counts = {host: asked.get(host, 0) or len(own.get("accelerators", ())) or 1 for host, own in facts.items()}
    words = (job.data.name, job.data.held_out, job.model.name, *job.train.custom_code)
    references = () if job.cluster.sync_code else tuple(filter(is_object_reference, words))
    needs = Needs(
        counts, job.cluster.threads, port=_rendezvous(job)[1], interface=job.cluster.interface,
        through_ssh=job.cluster.through_ssh, device=job.cluster.device, download=job.data.download,
        files=tuple(word.rpartition(":")[0] for word in references),
        reach={machine.name: ssh.ssh_prefix(machine, job.cluster) for machine in machines},
    )  # fmt: skip
    return Survey(tuple(machine.name for machine in machines), dict(facts), needs=needs)


def _survey_this_machine(job: Job, wanted: FactsWanted) -> Survey:
    name, facts = socket.gethostname(), gather_facts(wanted)
    survey = untested_survey(job, [Machine(name, job.cluster.processes)], {name: facts})
    address, port = _rendezvous(job)
    if address in {LOOPBACK, "::1", *local_candidates(facts)}:
        probe = Probe()
        (listener,) = probe.listen((address,), port)
        probe.unlisten()
        if listener.error:
            survey.port_errors[name] = listener.error
    return survey


def _rendezvous(job: Job) -> tuple[str, int]:
    """Returns (host, port) of the job's rendezvous URL if it is a tcp:// URL, otherwise ("", 0)."""
    url = urlparse(job.cluster.init)
    return (url.hostname or "", url.port or 0) if url.scheme == "tcp" else ("", 0)


def survey_agents(job: Job, agents: Machines, machines: Sequence[Machine], *, measure: bool = True) -> Survey:
    """Tests the connections between machines; with `measure`, also measures clocks and bandwidth for some seconds."""
    survey = untested_survey(job, machines, {machine.name: machine.facts for machine in agents.running})
    take_survey(agents.ask_named, survey, measure=measure)
    survey.errors |= {host: problem for host, problem in agents.problems.items() if host in survey.hosts}
    return survey


def _test_all_reduce(job: Job, agents: Machines, survey: Survey, say: Callable[[str], object]) -> DoctorFinding | None:
    """Tests an all-reduce with one process per machine. Returns None for one machine, or if other checks failed."""
    if len(survey.hosts) < 2 or survey.errors or {*survey.chosen} != {*survey.hosts} or any_failed(examine(survey)):
        return None
    with StoreTunnel(job.cluster) as tunnel:
        try:
            orders = _orders(job, agents, survey, tunnel)
        except ManyhandsError as error:
            return all_reduce_finding(survey, error.message)
        rendezvous = next(iter(orders.values())).rendezvous
        store = "" if rendezvous.address == LOOPBACK else f"port {rendezvous.port} of {rendezvous.address} and "
        where = ", ".join(survey.chosen[host][1] for host in survey.hosts)
        say(f"the all-reduce test opens {store}a free port on each of {where}; none of these ports needs a password")
        ending = supervise.supervise_once(orders, supervise.WatchHooks())
    if ending.ok:
        seconds = max(answer["seconds"] for answer in ending.returned.values())  # without torch's import
        what = f"an all-reduce over {len(survey.hosts)} machines took {seconds:.1f} s"
        return DoctorFinding("collective", "ok", survey.hosts, what, cause="collective")
    cause = first_cause(ending)
    reason = cause.what if cause else ending.broken.strip().rpartition("\n")[2]
    return all_reduce_finding(survey, reason, tuple(ending.lost))


def all_reduce_finding(survey: Survey, why: str, lost: tuple[str, ...] = ()) -> DoctorFinding:
    missing = f"; missing: {join_hosts(lost)}" if lost else ""
    what = f"the machines reach each other, but an all-reduce failed: {why}{missing}"
    hints = ("try gloo: --backend gloo", "with NCCL, set NCCL_DEBUG=INFO on the machines for details")
    return DoctorFinding("collective", "fail", lost or survey.hosts, what, hints, "collective")


def _orders(job: Job, agents: Machines, survey: Survey, store: StoreTunnel) -> dict[connection.AgentConnection, Orders]:
    """Returns the orders for the all-reduce test, by agent. Each agent starts one process in a temporary folder."""
    prepare_machines(agents, job.cluster, processes=1)
    for machine in agents.running:
        machine.address = Address(*survey.chosen[machine.name])
    store.open(agents)
    folders = agents.ask_each(call(agent.Agent.make_scratch), COLLECTIVE_S)
    limits = {"join_timeout_s": COLLECTIVE_S, "collective_timeout_s": COLLECTIVE_S, "threads": 1}
    quick = job.model_copy(update={"cluster": job.cluster.model_copy(update=limits)})
    orders = dict[connection.AgentConnection, Orders]()
    for number, (machine, folder) in enumerate(folders.items()):
        order = orders_for(quick, "add-up", folder, Rendezvous((1,) * len(folders), number, *machine.store))
        environment = machine.address.environment()
        orders[machine.agent] = replace(order, device=machine.device, environment=environment)
    return orders
