"""Hostfiles: OpenMPI's, Horovod's and DeepSpeed's ("n1 slots=4"), MPICH's ("n1:4"), and lists ("n1:4,user@n2").

A machine without a number has one process for each accelerator, or one where there is none. As with OpenMPI, a machine
that is named again gets more processes: one more, or as many as its slots say.
"""

import ipaddress
import re
from pathlib import Path

from manyhands.cluster.holding import must_hold
from manyhands.cluster.inventory import Cluster, Machine
from manyhands.cluster.located_json import at_line
from manyhands.core.errors import UserError
from manyhands.core.plugins import did_you_mean

NAMES = ("hostfile",)

_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_USER = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?"
_HOST = re.compile(rf"{_USER}(\[(?P<six>[^\[\]]*)\]|(?P<name>{_NAME}))(:(?P<slots>.*))?")
_BARE_SIX = re.compile(rf"{_USER}(?P<six>[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*:[0-9A-Za-z:.%_-]*)")
_SETTINGS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}
_MOST_SLOTS = 1024


def recognise(path: str, text: str) -> bool:
    """Whether it has slots; or only hosts, and numbers behind them or a name like a hostfile's."""
    lines = [line.split() for line in map(_without_comment, text.splitlines()) if line]
    name = Path(path).name.lower()
    if not lines or lines[0][0].startswith(("{", "[")):
        return False
    if "hostfile" in name or any(re.match(r"(max[_-]?)?slot", word) for words in lines for word in words[1:]):
        return True
    named = "host" in name or any(":" in words[0] for words in lines)
    return named and all(len(words) == 1 and _looks_like_a_host(words[0]) for words in lines)


def read(text: str, where: str) -> Cluster:
    """Reads a hostfile.

    Raises:
        UserError: a line is not a host with its slots; or there is no host at all.
    """
    found: list[tuple[Machine, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = _without_comment(line).split()
        if words:
            place = at_line(where, number)
            machine = _machine(words[0], place)
            found.append((_with_settings(machine, words[1:], place), place))
    if not found:
        raise UserError("there is no host in this file", where, ("one line for each machine: n1 slots=4",))
    return Cluster(_joined(found), source=f"hostfile {where}".rstrip())


def read_list(text: str, where: str) -> Cluster:
    """Reads "n1:4,user@n2,[fd00::1]:2".

    Raises:
        UserError: a part is not a host; or a host is there twice.
    """
    machines: list[Machine] = []
    for part in (word.strip() for word in text.split(",")):
        if not part:
            raise UserError(f'"{text}" has an empty place between commas', where, ("write it as n1,n2 or n1:4,n2:4",))
        if _BARE_SIX.fullmatch(part):
            what = f'"{part}" may be an address with a number behind it or without'
            raise UserError(what, where, ("put the address in brackets: [fd00::1] or [fd00::1]:4",))
        machine = _machine(part, where)
        if machine.name in {known.name for known in machines}:
            what = f"{machine.name} is there twice"
            raise UserError(what, where, (f"for more processes on it write {_shown(machine.name)}:2",))
        machines.append(machine)
    return Cluster(tuple(machines), source=f"{where} {text}".strip())


def write(cluster: Cluster) -> str:
    """Writes a hostfile.

    Raises:
        UserError: a hostfile can't hold this cluster.
    """
    lines = [f"{m.host} slots={m.slots}" if m.slots else m.host for m in cluster.machines]
    return must_hold("\n".join(lines) + "\n", cluster, read, "a hostfile")


def fit(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """The nearest cluster that a hostfile can hold, and what of it had to be left out."""
    notes = []
    if any(machine.devices for machine in cluster.machines):
        notes.append("numbers of devices are left out: a hostfile has no place for them")
    if cluster.master_address or cluster.master_port:
        notes.append("the master's address and port are left out: a hostfile has no place for them")
    machines = tuple(Machine(machine.host, machine.slots) for machine in cluster.machines)
    return Cluster(machines, source=cluster.source), notes


def _without_comment(line: str) -> str:
    return line.split("#")[0].strip()


def _looks_like_a_host(word: str) -> bool:
    matched = _HOST.fullmatch(word)
    return bool(_BARE_SIX.fullmatch(word)) or (matched is not None and (matched["slots"] or "1").isdecimal())


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _machine(word: str, where: str) -> Machine:
    bare = _BARE_SIX.fullmatch(word)
    matched = bare or _HOST.fullmatch(word)
    if matched is None:
        mend = "a name or address, with a number of processes or without: n1, n1:4, user@n1, 10.0.0.1, [fd00::1]:4"
        raise UserError(f'"{word}" is not a host', where, (mend,))
    name = matched["six"] if matched["six"] is not None else matched["name"]
    if matched["six"] is not None:
        try:
            ipaddress.IPv6Address(name)
        except ValueError as error:
            raise UserError(f'"{name}" is not an IPv6 address', where, ("write it as [fd00::1]:4",)) from error
    slots = 0 if bare or matched["slots"] is None else _slots(matched["slots"], "the number of processes", where)
    return Machine(f"{matched['user'] or ''}{name}", slots)


def _slots(text: str, name: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _MOST_SLOTS:
        what = f'{name} is "{text}"; expected a number from 1 to {_MOST_SLOTS}'
        raise UserError(what, where, ("write it as n1 slots=4, or n1:4",))
    return int(text)


def _with_settings(machine: Machine, words: list[str], where: str) -> Machine:
    found: dict[str, int] = {"slots": machine.slots} if machine.slots else {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _SETTINGS or not equals:
            known = "after a host there may be slots=4 and max_slots=8, without blanks"
            hint = known if key in _SETTINGS else did_you_mean(key, _SETTINGS) or known
            hint = f"write slots={word}" if word.isdecimal() else hint
            raise UserError(f'"{word}" is not known in a hostfile', where, (hint,))
        name = _SETTINGS[key]
        if name in found:
            raise UserError(f"{name} is given twice on this line", where, ("keep one of the two",))
        found[name] = _slots(value, name, where)
    slots = found.get("slots", 0)
    if found.get("max_slots", slots) < slots:
        what = f"max_slots is {found['max_slots']}, less than slots, which is {slots}"
        raise UserError(what, where, ("correct one of the two",))
    return Machine(machine.host, slots)


def _joined(found: list[tuple[Machine, str]]) -> tuple[Machine, ...]:
    """Adds up the lines of each machine, in the order in which they first came."""
    hosts: dict[str, str] = {}
    slots: dict[str, list[int]] = {}
    for machine, where in found:
        if hosts.setdefault(machine.name, machine.host) != machine.host:
            what = f"{machine.name} is named with two users: {hosts[machine.name]} and {machine.host}"
            raise UserError(what, where, ("name it with one user",))
        slots.setdefault(machine.name, []).append(machine.slots)
    return tuple(
        Machine(hosts[name], given[0] if len(given) == 1 else sum(number or 1 for number in given))
        for name, given in slots.items()
    )
