"""What machines that are joined through ssh pay for it: the way between two of them is tried out, before they train."""

from manyhands.cluster.agents.assemble import Crew
from manyhands.cluster.agents.dig import Way
from manyhands.cluster.agents.protocol import ReachThere
from manyhands.cluster.doctor.questions import Connect, Listen, Measure, Unlisten
from manyhands.core.link_speeds import LinkSpeed, agreement_times, without_ssh

_ANSWER_S, _CONNECT_S, _MEASURE_S = 30.0, 5.0, 0.4


def price_of(crew: Crew, way: Way) -> str:
    """A sentence on what an agreement of a crew costs through ssh, beside a direct way.

    Two machines are measured: some that a third passes on for, if there are any.

    Raises:
        RunError: one of the two is gone, or no tunnel leads to it.
    """
    names = [link.machine.name for link in crew.links]
    one, two = next(iter(way.through), (names[0], names[1]))
    here, there = (next(link for link in crew.links if link.machine.name == name) for name in (two, one))
    (target,) = there.ask(Listen((way.ends[one].address,)), _ANSWER_S).listeners
    here.ask(ReachThere(target.address, target.port), _ANSWER_S)
    (attempt,) = here.ask(Connect((target,), _CONNECT_S), _ANSWER_S).attempts
    measured = here.ask(Measure(target, _MEASURE_S), _ANSWER_S)
    there.ask(Unlisten(), _ANSWER_S)
    if attempt.latency_ms is None or not measured.mbps:
        return f"what an agreement costs through ssh is not known: {measured.error or attempt.result}"
    link = LinkSpeed(measured.mbps * 1e6 / 8, attempt.latency_ms / 2e3)
    small, large = agreement_times(len(names), link)
    least, less = agreement_times(len(names), without_ssh(link))
    return (
        f"an agreement of all takes {small} for 4 KiB and {large} for 64 MiB through ssh, by what {one} and "
        f"{two} measure, and {least} and {less} at best where they reach each other directly; --sync auto heeds that"
    )
