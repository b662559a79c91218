"""Finds by trying at which address, and so on which interface, each machine can be reached by all the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.cluster.addresses import choose_addresses, interface_of, own_candidates
from manyhands.cluster.assemble import Crew
from manyhands.cluster.findings import Attempt
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import EXIT_DOCTOR, RunError, UserError

CONNECT_S = 3.0
LOOPBACK = "127.0.0.1"
# What the backends' own searches for an interface obey.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
Reach = dict[tuple[str, str], tuple[Attempt, ...]]


@dataclass(frozen=True)
class Address:
    """Where a machine is reached by the others.

    Attributes:
        interface: its name there; empty where all processes are on one machine.
        address: of that interface.
    """

    interface: str
    address: str

    def environment(self) -> dict[str, str]:
        """Variables that have the backends listen there."""
        return dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}


def find_addresses(crew: Crew, options: ClusterOptions) -> list[Address]:
    """An address of each machine that all the others have just reached.

    Raises:
        RunError: two machines can't reach each other.
        UserError: a machine hasn't the interface that was asked for.
    """
    if len(crew.links) == 1:
        return [Address("", LOOPBACK)]
    names = [link.machine.name for link in crew.links]
    facts = dict(zip(names, (_narrowed(f, options, n) for f, n in zip(crew.facts, names, strict=True)), strict=True))
    reach = try_all(crew, facts)
    chosen = choose_addresses(facts, reach)
    lonely = [name for name in names if name not in chosen]
    if lonely:
        raise _unreachable(lonely[0], facts, reach)
    return [Address(*chosen[name]) for name in names]


def try_all(crew: Crew, facts: Mapping[str, Mapping[str, Any]]) -> Reach:
    """Has every machine try to reach every other at each of its addresses; listens only meanwhile."""
    names = list(facts)
    heard = crew.ask([{"do": "listen", "addresses": own_candidates(facts[name])} for name in names])
    try:
        targets = {
            name: [
                {"address": address, **told} for address, told in answer["listeners"].items() if "port" in told
            ]
            for name, answer in zip(names, heard, strict=True)
        }  # fmt: skip
        asked = {
            name: [(other, target) for other in names if other != name for target in targets[other]] for name in names
        }
        answers = crew.ask(
            [{"do": "connect", "targets": [t for _, t in asked[name]], "timeout_s": CONNECT_S} for name in names]
        )
    finally:
        crew.ask_each({"do": "unlisten"})
    reach: Reach = {}
    for name, answer in zip(names, answers, strict=True):
        for (other, _), attempt in zip(asked[name], answer["attempts"], strict=True):
            reach[name, other] = (*reach.get((name, other), ()), Attempt.read(attempt))
    return reach


def _narrowed(facts: Mapping[str, Any], options: ClusterOptions, name: str) -> Mapping[str, Any]:
    """The facts with only the interface that the user wants, if any."""
    if not options.interface:
        return facts
    kept = [entry for entry in facts.get("interfaces", ()) if entry["name"] == options.interface]
    if not kept:
        has = ", ".join(str(entry["name"]) for entry in facts.get("interfaces", ()))
        raise UserError(
            f"{name} has no interface {options.interface}", "--interface", (f"it has {has}", "or leave it out")
        )
    return {**facts, "interfaces": kept}


def _unreachable(name: str, facts: Mapping[str, Mapping[str, Any]], reach: Reach) -> RunError:
    """Who can't reach this machine, at which of its addresses, and how that failed."""
    lines: list[str] = []
    for (source, target), attempts in reach.items():
        if target == name and not any(attempt.result == "ok" for attempt in attempts):
            tried = ", ".join(
                f"{a.address} ({interface_of(facts[name], a.address)}): {_words(a.result)}" for a in attempts
            )
            lines.append(f"from {source}: {tried or 'it has no address beside loopback'}")
    what = f"the other machines can't all reach {name} on any of its addresses"
    error = RunError(what, name, (*lines, "a firewall between them? manyhands doctor --hosts … says more"))
    error.exit_code = EXIT_DOCTOR
    return error


def _words(result: str) -> str:
    return {"timeout": "no answer", "unreachable": "no way there", "other": "something else answers"}.get(
        result, result
    )
