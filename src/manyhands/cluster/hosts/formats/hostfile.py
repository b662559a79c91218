"""Hostfiles: OpenMPI's, Horovod's and DeepSpeed's ("n1 slots=4"), MPICH's ("n1:4"), and lists ("n1:4,user@n2").

A machine without a number runs one process per accelerator, or one process without accelerators. As in OpenMPI, a
repeated machine adds its slots, or one process. An ssh port is written as ssh://user@host:port, or as port= after the
host. A number after a colon counts processes. If it may also be an ssh port, it is refused, with hints for both cases.
"""

import re
from dataclasses import replace
from pathlib import Path

from manyhands.cluster.hosts.inventory import Cluster, Machine, at_line, in_brackets, is_host, parse_bounded_number
from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError

_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_USER = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?"
_HOST = re.compile(rf"{_USER}(\[(?P<six>[^\[\]]*)\]|(?P<name>{_NAME}))(:(?P<slots>.*))?")
_BARE_SIX = re.compile(rf"{_USER}(?P<six>[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*:[0-9A-Za-z:.%_-]*)")
_SSH = re.compile(rf"ssh://{_USER}(\[(?P<six>[^\[\]]*)\]|(?P<name>{_NAME}))(:(?P<port>[0-9]*))?/?")
_MOST = {"slots": 1024, "max_slots": 1024, "port": 65535}
_LIKE_A_PORT = 128  # a larger number after a colon may be an ssh port
_SSH_PORTS = {22, 222}


def recognize(path: str, text: str) -> bool:
    """Returns True if the file's name, a slots= or port= setting, or a list of hosts with ":" shows a hostfile."""
    lines, name = [words for words in map(_split_line, text.splitlines()) if words], Path(path).name.lower()
    if not lines or lines[0][0].startswith(("{", "[")):
        return False
    if "hostfile" in name or any(re.match(r"(max[_-]?)?slot|port=", word) for words in lines for word in words[1:]):
        return True
    named = "host" in name or any(":" in words[0] for words in lines)
    return named and all(len(words) == 1 and _looks_like_a_host(words[0]) for words in lines)


def read(text: str, where: str) -> Cluster:
    """Reads a hostfile. Raises UserError if a line is not a host with optional settings, or there are no hosts."""
    found: dict[str, Machine] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words, place = _split_line(line), at_line(where, number)
        if not words:
            continue
        machine = _parse_settings(words, place)
        known = found.setdefault(machine.name, machine)
        if known.host != machine.host:
            message = f"{machine.name} is listed with two users: {known.host} and {machine.host}"
            raise UserError(message, place, (f"use the same user on all lines of {machine.name}",))
        if known is not machine:
            found[machine.name] = replace(known, slots=(known.slots or 1) + (machine.slots or 1))
    if not found:
        raise UserError("the hostfile lists no hosts", where, ("write one line for each machine, such as n1 slots=4",))
    return Cluster(tuple(found.values()), source=f"hostfile {where}".rstrip())


def read_list(text: str, where: str) -> Cluster:
    """Reads a list such as "n1:4,user@n2,ssh://n3:2222", with 4 processes on n1. Raises UserError if it is invalid."""
    found: dict[str, Machine] = {}
    for part in map(str.strip, text.split(",")):
        if not part:
            hints = ("write a list such as n1,n2 or n1:4,n2:4",)
            raise UserError(f'the list of hosts "{text}" has an empty entry', where, hints)
        if _BARE_SIX.fullmatch(part):
            message = f'"{part}" is ambiguous: the last part may belong to the address or be a number of processes'
            raise UserError(message, where, ("put the address in brackets: [fd00::1] or [fd00::1]:4",))
        machine = _parse_settings(part.split(), where)
        if machine is not found.setdefault(machine.name, machine):
            more = f"{machine.target} slots=2" if machine.port else f"{in_brackets(machine.name)}:2"
            hints = (f"write {more} for two processes on {machine.name}",)
            raise UserError(f"{machine.name} is listed twice", where, hints)
    return Cluster(tuple(found.values()), source=f"{where} {text}".strip())


def write(cluster: Cluster) -> tuple[str, list[str]]:
    """Returns (text of a hostfile, notes on values that the format doesn't support)."""
    notes = {
        "device numbers are omitted: hostfiles don't have device numbers": any(m.devices for m in cluster.machines),
        "the master's port is omitted: hostfiles don't have a port for the master": cluster.master_port,
    }
    settings = ((m.host, m.slots and f" slots={m.slots}", m.port and f" port={m.port}") for m in cluster.machines)
    text = "".join(f"{host}{slots or ''}{port or ''}\n" for host, slots, port in settings)
    return text, [note for note, applies in notes.items() if applies]


def _split_line(line: str) -> list[str]:
    return line.partition("#")[0].split()


def _looks_like_a_host(word: str) -> bool:
    if _BARE_SIX.fullmatch(word) or _SSH.fullmatch(word):
        return True
    return (matched := _HOST.fullmatch(word)) is not None and (matched["slots"] or "1").isdecimal()


def _parse_host(word: str, where: str) -> Machine:
    """Parses NAME, NAME:SLOTS or ssh://NAME:PORT. USER@ may precede NAME."""
    address = word.startswith("ssh://")
    matched = _SSH.fullmatch(word) if address else _BARE_SIX.fullmatch(word) or _HOST.fullmatch(word)
    if matched is None:
        hint = "write a name or an address, with or without a number of processes: n1, user@n1, 10.0.0.1, [fd00::1]:4"
        hint = "write ssh://user@host:31234, without a password and without a path" if address else hint
        without_password = re.sub(r"(?<=://)([^@/:]*):[^@]*@", r"\1:…@", word)
        raise UserError(f'"{without_password}" is not {"an ssh address" if address else "a host"}', where, (hint,))
    found = matched.groupdict()
    six, port, slots = (found.get(key) for key in ("six", "port", "slots"))
    if six is not None and not (":" in six and is_host(six)):
        raise UserError(f'"{six}" is not an IPv6 address', where, ("write an address such as [fd00::1]:4",))
    machine = Machine(f"{found['user'] or ''}{found['name'] if six is None else six}")
    if port:
        return replace(machine, port=_parse_number(port, "port", "the port", where))
    if slots is None:
        return machine
    number = int(slots) if re.fullmatch(r"[0-9]{1,5}", slots) else 0
    if number in _SSH_PORTS or _LIKE_A_PORT < number <= _MOST["port"]:
        hint = "for an ssh port and a number of processes, write a hostfile line such as n1 slots=4 port=31234"
        if number <= _MOST["slots"]:
            hint = f'for a number of processes, write "{machine.host} slots={number}"'
        hints = (f"for an ssh port, write {replace(machine, port=number).target}", hint)
        message = f"{machine.host}:{number} is ambiguous: {number} may be an ssh port or a number of processes"
        raise UserError(message, where, hints)
    return replace(machine, slots=_parse_number(slots, "slots", "the number of processes", where))


def _parse_number(text: str, setting: str, name: str, where: str) -> int:
    form = "n1 slots=4 port=31234, or ssh://n1:31234" if setting == "port" else "n1 slots=4, or n1:4"
    return parse_bounded_number(name, text, 1, _MOST[setting], where, f"write {form}")


def _parse_settings(words: list[str], where: str) -> Machine:
    machine = _parse_host(words[0], where)
    found = {name: value for name, value in (("slots", machine.slots), ("port", machine.port)) if value}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        name = "max_slots" if name == "max-slots" else name
        if name not in _MOST or not equals:
            hint = did_you_mean(name, _MOST) if name not in _MOST else ""
            hint = f"write slots={word}" if word.isdecimal() else hint
            known = "write settings without spaces around =: slots=4, max_slots=8, port=31234"
            raise UserError(f'"{word}" is not a hostfile setting', where, (hint or known,))
        if name in found:
            raise UserError(f"{name} is given twice on one line", where, (f"remove one of the {name} settings",))
        found[name] = _parse_number(value, name, name, where)
    slots = found.get("slots", 0)
    if found.get("max_slots", slots) < slots:
        message = f"max_slots ({found['max_slots']}) is less than slots ({slots})"
        raise UserError(message, where, ("correct slots or max_slots",))
    return Machine(machine.host, slots, port=found.get("port", 0))
