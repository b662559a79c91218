"""From a list of machines to agents that are there, know each other's addresses, and are ready to start workers."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.cluster.findings import Contact
from manyhands.cluster.inventory import Machine
from manyhands.cluster.link import Link, LinkClosed, Message, ask_all, close_all
from manyhands.cluster.orders import PRELOAD
from manyhands.cluster.own import is_here
from manyhands.cluster.ssh import explain_contact
from manyhands.cluster.start import open_here, open_there
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import EXIT_DOCTOR, RunError, UserError

# ssh gives up after CONNECT_S; Python's own start on a busy machine takes seconds too.
HELLO_S = 45.0
# Importing torch from a cold disk takes long.
PREPARE_S = 300.0
REQUEST_S = 30.0


@dataclass
class Crew:
    """The agents of all machines, in the order of their ranks.

    Attributes:
        links: the conversations.
        facts: what each machine said of itself.
        clock_offsets_s: machine's name to how far its clock is ahead of ours.
        contacts: machine's name to why no agent answers there; such a machine has no link.
    """

    links: list[Link]
    facts: list[Message]
    clock_offsets_s: dict[str, float] = field(default_factory=dict[str, float])
    contacts: dict[str, Contact] = field(default_factory=dict[str, Contact])

    def ask(self, requests: Sequence[Mapping[str, Any]], timeout_s: float = REQUEST_S) -> list[Message]:
        """Asks every machine its own question.

        Raises:
            RunError: a machine is gone, or its request failed.
        """
        answers = ask_all(self.links, requests, timeout_s)
        for answer in answers:
            if isinstance(answer, RunError):
                raise answer
        return [answer for answer in answers if isinstance(answer, dict)]

    def ask_each(self, request: Mapping[str, Any], timeout_s: float = REQUEST_S) -> list[Message]:
        """Asks every machine the same question."""
        return self.ask([request] * len(self.links), timeout_s)

    def require_all(self) -> None:
        """Refuses to go on without the machines that no agent answers from.

        Raises:
            RunError: names them, and says how to mend it.
        """
        if not self.contacts:
            return
        if len(self.contacts) == 1:
            ((host, contact),) = self.contacts.items()
            error = RunError(contact.what, host, contact.mend)
        else:
            lines = tuple(f"{contact.what}: {contact.mend[0]}" for contact in self.contacts.values())
            error = RunError(f"{len(self.contacts)} machines can't be used", ", ".join(self.contacts), lines)
        error.exit_code = EXIT_DOCTOR
        raise error


@contextmanager
def assembled(
    machines: Sequence[Machine], options: ClusterOptions, logs: Path, request: Mapping[str, Any]
) -> Iterator[Crew]:
    """Starts an agent on each machine and has it say who it is; all are ended with the block.

    Args:
        machines: each but this one is reached over ssh.
        options: of the cluster.
        logs: folder for what the agents write to their standard error.
        request: what the agents are asked for beside the general facts.
    """
    refuse_doubles(machines)
    links: list[Link] = []
    with _ended_like_ctrl_c():
        try:
            links.extend(_open(machine, options, logs) for machine in machines)
            yield _greet(links, options, request)
        finally:
            close_all(links)


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as Ctrl-C does, so that what was begun is cleaned up."""
    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # only the main thread may
            previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def refuse_doubles(machines: Sequence[Machine]) -> None:
    """Machines are told apart by their names.

    Raises:
        UserError: one is named twice.
    """
    names = [machine.name for machine in machines]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{', '.join(twice)} is named twice", "cluster.hosts", (f"{twice[0]}:2 for two processes",))


def _open(machine: Machine, options: ClusterOptions, logs: Path) -> Link:
    if is_here(machine):
        return open_here(logs / "agent.log", machine)
    return open_there(machine, options, logs / f"agent@{machine.name}.log")


def _greet(links: list[Link], options: ClusterOptions, request: Mapping[str, Any]) -> Crew:
    asked = time.time()
    answers = ask_all(links, [{"do": "hello", "remote": not link.here, **request} for link in links], HELLO_S)
    crew = Crew([], [])
    close_all([link for link, answer in zip(links, answers, strict=True) if isinstance(answer, LinkClosed)])
    for link, answer in zip(links, answers, strict=True):
        if isinstance(answer, LinkClosed):
            code = link.close()
            crew.contacts[link.machine.name] = explain_contact(link.machine, code, link.said(), options)
        elif isinstance(answer, RunError):
            raise answer
        else:
            crew.links.append(link)
            crew.facts.append(answer["facts"])
            crew.clock_offsets_s[link.machine.name] = _offset(answer["facts"].get("time", 0.0), asked)
    return crew


def _offset(there: float, asked: float) -> float:
    """How far a clock is ahead, as far as the time that the answer took lets us know; 0 within that."""
    now = time.time()
    return there - now if there > now else there - asked if there < asked else 0.0


def prepare(crew: Crew, sizes: Sequence[int], options: ClusterOptions) -> tuple[list[int], list[str]]:
    """Has every machine import torch, and learns the number of processes where it is left to the machine.

    Returns:
        Processes on each machine, and the kind of device there.
    """
    requests = [
        {"do": "prepare", "size": size, "threads": options.threads, "device": options.device, "preload": list(PRELOAD)}
        for size in sizes
    ]
    answers = crew.ask(requests, PREPARE_S)
    for link, size, answer in zip(crew.links, sizes, answers, strict=True):
        device, count = answer["device"], answer["count"]
        if size > count and device not in {"cpu", "mps"}:
            raise UserError(
                f"{size} processes are asked for, and {link.machine.name} has {count} {device} devices",
                "cluster.hosts",
                (f"{link.machine.host}:{count}", "or --device cpu"),
            )
    return [size or answer["count"] for size, answer in zip(sizes, answers, strict=True)], [
        answer["device"] for answer in answers
    ]
