"""Asks machines all that the doctor's checks want to know: their facts are there; clocks, ways and speeds are tried."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from manyhands.cluster.doctor.addresses import choose_addresses, local_candidates
from manyhands.cluster.doctor.findings import Attempt, Contact, Facts, Needs, Survey
from manyhands.cluster.doctor.probe import Listener, Probe
from manyhands.cluster.messages import R, Request, call
from manyhands.core.errors import RunError

# Longer than a measurement may take where every word of it comes at the last moment.
ANSWER_S = 30.0
CONNECT_S = 3.0
MEASURE_S = 0.4
# With many machines not every pair is measured, so that it stays a matter of seconds; nor does each reach for all
# others, which would be a million ways with a thousand machines.
MOST_ROUNDS, MOST_TRIED = 24, 64
AGAIN_FACTOR = 2.0
CLOCK_QUESTIONS = 3
LISTEN_S = 120.0


class AskMachines(Protocol):
    """Asks several machines at once, by name, each its own question."""

    def __call__(self, requests: Mapping[str, Request[R]], timeout_s: float) -> Mapping[str, R | RunError]:
        """For each machine its answer, or the error that stands in its place."""
        ...


def take_survey(
    ask: AskMachines, facts: Mapping[str, Facts], hosts: Sequence[str], needs: Needs, *, measure: bool = True
) -> Survey:
    """Tries out everything between machines whose facts are known.

    `hosts` are all machines in the order of their ranks, those included that don't answer. A machine that stops
    answering meanwhile is noted among the survey's errors, and left out of the rest. `measure`: clocks and the speed of
    links too, which takes seconds.
    """
    survey = Survey(tuple(hosts), dict(facts), needs=needs)
    talk = _Talk(ask, survey)
    if measure:
        _compare_clocks(talk, survey)
    if len(talk.hosts) > 1 and not needs.through_ssh:
        targets = _listen(talk, survey)
        _try_all(talk, survey, targets)
        survey.chosen = choose_addresses(_narrowed(survey), survey.reach)
        if measure:
            _measure_all(talk, survey, targets)
        talk.ask(dict.fromkeys(talk.hosts, call(Probe.unlisten)))
    _try_port(talk, survey)
    return survey


class _Talk:
    """The conversations with those machines that still answer."""

    def __init__(self, ask: AskMachines, survey: Survey) -> None:
        self.hosts = list(survey.facts)
        self._ask, self._survey = ask, survey

    def ask(self, requests: Mapping[str, Request[R]], timeout_s: float = ANSWER_S) -> dict[str, R]:
        """Asks several machines at once; those that fail are noted, and not asked again."""
        asked = {host: request for host, request in requests.items() if host in self.hosts}
        answers: dict[str, R] = {}
        for host, reply in self._ask(asked, timeout_s).items() if asked else ():
            if isinstance(reply, RunError):
                self.hosts.remove(host)
                self._survey.facts.pop(host, None)
                what = f"{host} stopped answering: {reply.message}"
                self._survey.errors[host] = Contact("other", what, reply.hints or ("run the doctor again",))
            else:
                answers[host] = reply
        return answers


def _compare_clocks(talk: _Talk, survey: Survey) -> None:
    """Takes the quickest of a few questions: what its way took is how uncertain the answer is."""
    for host in list(talk.hosts):
        tries: list[tuple[float, float]] = []
        for _ in range(CLOCK_QUESTIONS):
            before = time.time()
            shown = talk.ask({host: call(Probe.clock)}).get(host)
            after = time.time()
            if shown is not None:
                tries.append(((after - before) / 2, shown - (before + after) / 2))
        if tries:
            uncertain, offset = min(tries)
            survey.clock_s[host] = (offset, uncertain)


def _narrowed(survey: Survey) -> dict[str, Facts]:
    """The facts with only the interface that the job names, where a machine has it; where not, a check says so."""
    wanted = survey.needs.interface
    narrowed: dict[str, Facts] = {}
    for host, facts in survey.facts.items():
        kept = [entry for entry in facts.get("interfaces", ()) if entry["name"] == wanted]
        narrowed[host] = {**facts, "interfaces": kept} if kept else facts
    return narrowed


def _listen(talk: _Talk, survey: Survey) -> dict[str, list[Listener]]:
    """Has each machine listen on each of its addresses; gives what others need to reach it."""
    facts = _narrowed(survey)
    addresses = {host: tuple(local_candidates(facts[host])) for host in talk.hosts}
    answers = talk.ask({host: call(Probe.listen, own, seconds=LISTEN_S) for host, own in addresses.items()})
    return {host: [one for one in listeners if not one.error] for host, listeners in answers.items()}


def ways_tried(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Whom each machine tries to reach: all others, or of many some, and the first, which all must reach."""
    pairs = {pair for pairs in rounds(hosts, MOST_TRIED) for pair in pairs} | {(host, hosts[0]) for host in hosts[1:]}
    found: dict[str, list[str]] = {host: [] for host in hosts}
    for host, other in sorted(pairs):
        found[host].append(other)
    return found


def _try_all(talk: _Talk, survey: Survey, targets: Mapping[str, list[Listener]]) -> None:
    others = {host: [other for other in found if other in targets] for host, found in ways_tried(talk.hosts).items()}
    asked = {host: [(other, target) for other in others[host] for target in targets[other]] for host in talk.hosts}
    requests = {
        host: call(Probe.connect, tuple(target for _, target in tried), CONNECT_S) for host, tried in asked.items()
    }
    for host, attempts in talk.ask(requests).items():
        survey.reach.update({(host, other): () for other in others[host]})
        for (other, _), attempt in zip(asked[host], attempts, strict=True):
            survey.reach[host, other] = (*survey.reach[host, other], attempt)


def _measure_all(talk: _Talk, survey: Survey, targets: Mapping[str, list[Listener]]) -> None:
    """Rounds of disjoint pairs, so that no machine's link carries two measurements at once.

    A machine that is busy for a moment makes a link look slow, or gives no figure at all, and nothing makes it look
    fast: so odd ones are tried again.
    """
    for pairs in rounds(talk.hosts, MOST_ROUNDS):
        _measure(talk, survey, targets, pairs)
    usual = statistics.median(survey.mbps.values()) if survey.mbps else 0.0
    for pairs in rounds(talk.hosts, MOST_ROUNDS):
        odd = [pair for pair in pairs if survey.mbps.get(pair, 0.0) * AGAIN_FACTOR <= usual]
        _measure(talk, survey, targets, odd)


def _measure(talk: _Talk, survey: Survey, targets: Mapping[str, list[Listener]], pairs: list[tuple[str, str]]) -> None:
    ways = {pair: way for pair in pairs if (way := _way(survey, targets, pair))}
    answers = talk.ask({pair[0]: call(Probe.measure, target, MEASURE_S) for pair, (target, _) in ways.items()})
    for pair, (_, attempt) in ways.items():
        answer = answers.get(pair[0])
        if answer and answer.mbps is not None:
            survey.mbps[pair] = max(answer.mbps, survey.mbps.get(pair, 0.0))
        if attempt.latency_ms is not None:
            survey.latency_ms[pair] = attempt.latency_ms


def _way(
    survey: Survey, targets: Mapping[str, list[Listener]], pair: tuple[str, str]
) -> tuple[Listener, Attempt] | None:
    """Where the first of a pair reached the second: at the chosen address, or at any."""
    reached = [attempt for attempt in survey.reach.get(pair, ()) if attempt.result == "ok"]
    chosen = survey.chosen.get(pair[1], ("", ""))[1]
    reached.sort(key=lambda attempt: attempt.address != chosen)
    for attempt in reached[:1]:
        return next(target for target in targets[pair[1]] if target.address == attempt.address), attempt
    return None


def _try_port(talk: _Talk, survey: Survey) -> None:
    """Whether the first machine could listen on the port that the job names, and the others reach it there."""
    host, port = survey.hosts[0], survey.needs.port
    address = survey.chosen.get(host, ("", ""))[1]
    if not (port and address and host in talk.hosts):
        return
    (listener,) = talk.ask({host: call(Probe.listen, (address,), port)}).get(host, (None,))
    if listener and listener.error:
        survey.port_errors[host] = listener.trouble
    elif listener:
        connect = call(Probe.connect, (listener,), CONNECT_S)
        answers = talk.ask({other: connect for other in talk.hosts if other != host})
        results = {other: attempt.result for other, (attempt,) in answers.items()}
        lost = [f"{other} can't connect ({result})" for other, result in results.items() if result != "ok"]
        if lost:
            survey.port_errors[host] = "; ".join(lost)
    talk.ask({host: call(Probe.unlisten)})


def matrix(survey: Survey, values: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Pairs as nested tables, for scripts."""
    return {
        one: {two: values[one, two] for two in survey.hosts if (one, two) in values}
        for one in survey.hosts
        if any((one, two) in values for two in survey.hosts)
    }


def rounds(hosts: Sequence[str], most: int = 0) -> list[list[tuple[str, str]]]:
    """A tournament of each pair (sender, receiver), in `most` rounds (0: all) of disjoint pairs."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, played = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        if 0 < most <= len(played):
            break
        pairs = [
            (one, two)
            for one, two in zip(seats[:half], reversed(seats[half:]), strict=True)
            if one is not None and two is not None
        ]
        played += [pairs, [(two, one) for one, two in pairs]] if pairs else []
        seats = [seats[0], seats[-1], *seats[1:-1]]  # one stays, the others move on
    return played[:most] if most else played
