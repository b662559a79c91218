"""What is the same on all machines, and who differs; and how a list of hosts reads."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from manyhands.cluster.doctor.findings import Survey

Value = TypeVar("Value", bound=Hashable)


def fact(survey: Survey, *path: str) -> dict[str, Any]:
    """One fact of each machine that knows it, by host and in the order of the hosts."""
    found: dict[str, Any] = {}
    for host in survey.hosts:
        value: Any = survey.facts.get(host)
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[host] = value
    return found


def odd_ones(values: Mapping[str, Value]) -> tuple[Value | None, dict[str, Value]]:
    """The value that most have (of equally many, the first host's), and those who have another."""
    if not values:
        return None, {}
    counts = Counter(values.values())
    common = max(values.values(), key=lambda value: counts[value])
    return common, {host: value for host, value in values.items() if value != common}


def who(hosts: Iterable[str]) -> str:
    """n1; n1 and n2; n1, n2 and n3."""
    names = list(hosts)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def on_host(survey: Survey, host: str, command: str) -> str:
    """A command as it must be typed here to run on a host."""
    return command if len(survey.hosts) == 1 else f"{survey.needs.reach.get(host, f'ssh {host}')} {command}"
