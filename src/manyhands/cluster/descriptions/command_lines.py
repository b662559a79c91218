"""Commands in a text: a shell script's lines, each with the variables set for it and the machine that it is for."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.cluster.descriptions.located_json import at_line
from manyhands.core.errors import UserError
from manyhands.core.plugins import did_you_mean

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_ON = re.compile(r"#\s*on\s+(\S+)\s*")


@dataclass(frozen=True)
class Command:
    """One command."""

    words: tuple[str, ...]  # the program and its arguments
    variables: Mapping[str, str] = field(default_factory=dict)  # those set before it, as in `NAME=value program`
    host: str = ""  # the machine that a comment before it names: "# on n1"; empty without
    where: str = ""  # file and line, for the user


IsWanted = Callable[[Sequence[str]], bool]


def has_command(text: str, is_wanted: IsWanted) -> bool:
    """Whether one of a script's lines is a wanted command, even one that can't be read."""
    try:
        return bool(_commands(text, "", is_wanted))
    except UserError:
        return True


def commands(text: str, where: str, is_wanted: IsWanted, example: str) -> list[Command]:
    """The wanted commands of a script; lines may go on after a backslash. Raises UserError: none, or a broken one."""
    found = _commands(text, where, is_wanted)
    if not found:
        raise UserError(f"there is no {example.partition(' ')[0]} command in it", where, (example,))
    return found


def _commands(text: str, where: str, is_wanted: IsWanted) -> list[Command]:
    found: list[Command] = []
    host = ""
    for number, line in _whole_lines(text):
        if matched := _ON.fullmatch(line.strip()):
            host = matched[1]
            continue
        command = _command(line, at_line(where, number), host, is_wanted)
        if command:
            found.append(command)
            host = ""
    return found


def _whole_lines(text: str) -> list[tuple[int, str]]:
    """Lines with those that they go on in, and the number of the first."""
    whole: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), 1):
        kept = line.rstrip()
        if goes_on:
            whole[-1] = (whole[-1][0], f"{whole[-1][1]} {kept.removesuffix(chr(92))}")
        else:
            whole.append((number, kept.removesuffix(chr(92))))
        goes_on = kept.endswith(chr(92))
    return whole


def _command(line: str, where: str, host: str, is_wanted: IsWanted) -> Command | None:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        if not is_wanted(_rest(line.split())):
            return None
        raise UserError(f"this command's quotes don't match: {error}", where, ("close the quote",)) from error
    words = _first_command(words)
    rest = _rest(words)
    if not is_wanted(rest):
        return None
    set_before = (word.partition("=") for word in words[: len(words) - len(rest)])
    return Command(tuple(rest), {name: value for name, _, value in set_before}, host, where)


def _first_command(words: list[str]) -> list[str]:
    ends = [index for index, word in enumerate(words) if set(word) <= set(";&|<>()")]
    return words[: ends[0]] if ends else words


def _rest(words: list[str]) -> list[str]:
    position = 0
    while position < len(words) and _VARIABLE.fullmatch(words[position]):
        position += 1
    return words[position:]


@dataclass(frozen=True)
class CommandFlags:
    """A program's flags."""

    valued: frozenset[str]  # names of those that take a value, without dashes and with underscores
    switches: frozenset[str] = frozenset()  # names of those that take none
    short: Mapping[str, str] = field(default_factory=dict)  # one-letter names to long ones

    def read(self, words: Sequence[str], where: str) -> dict[str, str]:
        """Flags before the program that is to be started; switches are "true". Raises UserError: one is wrong."""
        found: dict[str, str] = {}
        position = 0
        while position < len(words) and words[position].startswith("-") and words[position] != "--":
            word = words[position]
            typed, equals, value = word.partition("=")
            name = self._name(typed, where)
            position += 1
            if name in self.switches:
                found[name] = "true"
                continue
            if not equals:
                if position >= len(words):
                    raise UserError(f"{word} needs a value", where, (f"write it as {word}=VALUE",))
                value = words[position]
                position += 1
            if "$" in value or "`" in value:
                what = f"{typed} is {value}, which only a shell can fill in"
                raise UserError(what, where, ("write its value into the file",))
            found[name] = value
        return found

    def _name(self, typed: str, where: str) -> str:
        name = typed.lstrip("-").replace("-", "_")
        name = name if typed.startswith("--") else self.short.get(name, "")
        if name not in self.valued | self.switches:
            known = {f"--{known.replace('_', '-')}" for known in self.valued | self.switches}
            hint = did_you_mean(typed.replace("_", "-"), known) or "known: " + ", ".join(sorted(known))
            raise UserError(f"there is no flag {typed}", where, (hint,))
        return name


def number(flags: Mapping[str, str], name: str, least: int, most: int, where: str) -> int:
    """A flag's whole number. Raises UserError: it is not one, or outside least … most."""
    text = flags[name]
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or not least <= int(text) <= most:
        flag = name if name.isupper() else f"--{name.replace('_', '-')}"
        what = f'{flag} is "{text}"; expected a number from {least} to {most}'
        raise UserError(what, where, ("correct it",))
    return int(text)


def visible_devices(command: Command, variable: str) -> tuple[int, ...]:
    """Numbers of the devices that a variable before the command leaves, if set. Raises UserError: no numbers."""
    text = command.variables.get(variable, "")
    if not text:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words) or len(set(words)) < len(words):
        raise UserError(f'{variable} is "{text}"; expected numbers such as 0,1', command.where, ("correct it",))
    return tuple(int(word) for word in words)
