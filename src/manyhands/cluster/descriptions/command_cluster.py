"""A cluster from the commands that start each of its machines, as torchrun and msrun have them; and these commands.

A comment before a command says which machine it is for: "# on n1". Without it the first machine is the master, and
the others' names are empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manyhands.cluster.descriptions.command_lines import Command
from manyhands.cluster.descriptions.holding import canonical
from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.core.errors import UserError


@dataclass(frozen=True)
class Start:
    """What one command says."""

    command: Command  # it
    machines: int  # how many take part
    slots: int  # processes on its own machine; 0 for one per accelerator
    rank: int | None  # of its own machine; None where it doesn't say
    address: str  # of the master; empty where it doesn't say
    port: int  # of the master; 0 where it doesn't say
    devices: tuple[int, ...]  # numbers of the devices that it uses; empty for all


def joined(starts: Sequence[Start], rank_flag: str, address_flag: str) -> Cluster:
    """The cluster that all commands mean; one is for machines like its own. Raises UserError: they don't fit."""
    first = starts[0]
    for start in starts[1:]:
        if (start.machines, start.address, start.port) != (first.machines, first.address, first.port):
            what = f"this command is for {_meeting(start)}, the first one for {_meeting(first)}"
            mend = ("all machines' commands agree on their number and on the master",)
            raise UserError(what, start.command.where, mend)
    if first.machines > 1 and not first.address:
        what = f"{first.machines} machines need to know where the first one is"
        raise UserError(what, first.command.where, (f"add {address_flag} with its address",))
    own = _alone(first) if len(starts) == 1 else _by_rank(starts, rank_flag)
    machines = tuple(
        _machine(start, rank, is_own=len(starts) > 1 or first.rank in (None, rank)) for rank, start in enumerate(own)
    )
    return canonical(Cluster(machines, first.address, first.port, machine=first.rank if len(starts) == 1 else None))


def lines(cluster: Cluster, command: Callable[[int, Machine, str], str]) -> str:
    """A command for each machine, or for this one alone where the cluster says which that is.

    It is made of the machine's rank, itself and the master's address. Raises UserError: nothing says where the first
    machine is.
    """
    address = cluster.master_address or cluster.machines[0].address
    if len(cluster.machines) > 1 and not address:
        raise UserError("the first machine has no name, and there is no master address", cluster.source)
    if len(cluster.machines) == 1 and not cluster.master_address:
        address = ""
    written: list[str] = []
    for rank, machine in enumerate(cluster.machines):
        if cluster.machine in (None, rank):
            if machine.host and machine.host != "localhost":
                written.append(f"# on {machine.host}")
            written.append(command(rank, machine, address))
    return "\n".join(written) + "\n"


def fit(cluster: Cluster, name: str) -> tuple[Cluster, list[str]]:
    if cluster.machine is None or not all(machine.host for machine in cluster.machines):
        return cluster, []
    kept = Cluster(cluster.machines, cluster.master_address, cluster.master_port, source=cluster.source)
    return kept, [f"{name} is written for every machine, not for this one alone"]


def _meeting(start: Start) -> str:
    return f"{start.machines} machines that meet at {start.address or 'an unknown address'}:{start.port or 'any port'}"


def _alone(start: Start) -> list[Start]:
    if start.rank is not None and start.rank >= start.machines:
        what = f"this command is for machine {start.rank}, but there are {start.machines}, counted from 0"
        raise UserError(what, start.command.where, ("correct one of the two",))
    return [start] * start.machines


def _by_rank(starts: Sequence[Start], rank_flag: str) -> list[Start]:
    found: dict[int, Start] = {}
    for start in starts:
        if start.rank is None:
            what = "several commands, and this one doesn't say which machine it is for"
            raise UserError(what, start.command.where, (f"give each its own {rank_flag}",))
        if start.rank in found or start.rank >= start.machines:
            what = f"{rank_flag} is {start.rank}; expected 0 … {start.machines - 1}, each once"
            raise UserError(what, start.command.where, (f"give each command its own {rank_flag}",))
        found[start.rank] = start
    missing = [rank for rank in range(starts[0].machines) if rank not in found]
    if missing:
        what = f"{starts[0].machines} machines, but there is no command for {rank_flag} {missing[0]}"
        raise UserError(what, starts[0].command.where, ("add it, or leave one command alone",))
    return [found[rank] for rank in range(starts[0].machines)]


def _machine(start: Start, rank: int, *, is_own: bool) -> Machine:
    """One machine; of another machine than the command's own, only the number of processes is known."""
    named = start.command.host if is_own and (start.rank is not None or start.machines == 1) else ""
    if not named and rank == 0:
        named = start.address or "localhost"
    return Machine(named, start.slots, start.devices if is_own else ())
