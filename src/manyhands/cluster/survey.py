"""Asks machines all that the doctor's checks want to know: their facts are there; clocks, ways and speeds are tried."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.cluster.addresses import choose_addresses, own_candidates
from manyhands.cluster.findings import Attempt, Contact, Facts, Needs, Survey
from manyhands.cluster.link import Link, ask_all
from manyhands.cluster.rounds import rounds
from manyhands.core.errors import RunError

Request = Mapping[str, Any]
Target = dict[str, Any]
ANSWER_S = 15.0
CONNECT_S = 3.0
MEASURE_S = 0.4
# With many machines not every pair is measured, so that it stays a matter of seconds.
MOST_ROUNDS = 24
AGAIN_FACTOR = 2.0
CLOCK_QUESTIONS = 3
LISTEN_S = 120.0


def take_survey(
    links: Sequence[Link], facts: Mapping[str, Facts], hosts: Sequence[str], needs: Needs, *, measure: bool = True
) -> Survey:
    """Tries out everything between machines whose facts are known.

    A machine that stops answering meanwhile is noted among the survey's errors, and left out of the rest.

    Args:
        links: to the machines that answer.
        facts: of these, by the machine's name.
        hosts: all machines in the order of their ranks, those included that don't answer.
        needs: of the job.
        measure: clocks and the speed of links too, which takes seconds.
    """
    survey = Survey(tuple(hosts), dict(facts), needs=needs)
    talk = _Talk(links, survey)
    if measure:
        _compare_clocks(talk, survey)
    if len(talk.links) > 1:
        targets = _listen(talk, survey)
        _try_all(talk, survey, targets)
        survey.chosen = choose_addresses(_narrowed(survey), survey.reach)
        if measure:
            _measure_all(talk, survey, targets)
        talk.ask_each({"do": "unlisten"})
    _try_port(talk, survey)
    return survey


class _Talk:
    """The conversations with those machines that still answer."""

    def __init__(self, links: Sequence[Link], survey: Survey) -> None:
        self.links = {link.machine.name: link for link in links}
        self._survey = survey

    def ask(self, requests: Mapping[str, Request], timeout_s: float = ANSWER_S) -> dict[str, dict[str, Any]]:
        """Asks several machines at once; those that fail are noted, and not asked again."""
        asked = {host: request for host, request in requests.items() if host in self.links}
        if not asked:
            return {}
        replies = ask_all([self.links[host] for host in asked], list(asked.values()), timeout_s, self.links.values())
        answers: dict[str, dict[str, Any]] = {}
        for host, reply in zip(asked, replies, strict=True):
            if isinstance(reply, RunError):
                del self.links[host]
                self._survey.facts.pop(host, None)
                what = f"{host} stopped answering: {reply.what}"
                self._survey.errors[host] = Contact("other", what, reply.mend or ("run the doctor again",))
            else:
                answers[host] = reply
        return answers

    def ask_each(self, request: Request) -> dict[str, dict[str, Any]]:
        """Asks every machine the same."""
        return self.ask(dict.fromkeys(self.links, request))


def _compare_clocks(talk: _Talk, survey: Survey) -> None:
    """Takes the quickest of a few questions: what its way took is how uncertain the answer is."""
    for host in list(talk.links):
        tries: list[tuple[float, float]] = []
        for _ in range(CLOCK_QUESTIONS):
            before = time.time()
            answer = talk.ask({host: {"do": "clock"}}).get(host)
            after = time.time()
            if answer:
                tries.append(((after - before) / 2, float(answer["time"]) - (before + after) / 2))
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


def _listen(talk: _Talk, survey: Survey) -> dict[str, list[Target]]:
    """Has each machine listen on each of its addresses; gives what others need to reach it."""
    facts = _narrowed(survey)
    requests = {
        host: {"do": "listen", "addresses": own_candidates(facts[host]), "seconds": LISTEN_S} for host in talk.links
    }
    return {
        host: [{"address": address, **told} for address, told in answer["listeners"].items() if "port" in told]
        for host, answer in talk.ask(requests).items()
    }


def _try_all(talk: _Talk, survey: Survey, targets: Mapping[str, list[Target]]) -> None:
    asked = {
        host: [(other, target) for other in targets if other != host for target in targets[other]]
        for host in talk.links
    }
    requests = {
        host: {"do": "connect", "targets": [target for _, target in tried], "timeout_s": CONNECT_S}
        for host, tried in asked.items()
    }
    for host, answer in talk.ask(requests).items():
        survey.reach |= {(host, other): () for other in targets if other != host}
        for (other, _), attempt in zip(asked[host], answer["attempts"], strict=True):
            survey.reach[host, other] = (*survey.reach[host, other], Attempt.read(attempt))


def _measure_all(talk: _Talk, survey: Survey, targets: Mapping[str, list[Target]]) -> None:
    """Rounds of disjoint pairs, so that no machine's link carries two measurements at once.

    A machine that is busy for a moment makes a link look slow, and nothing makes it look fast: so odd ones are tried
    again.
    """
    for pairs in rounds(list(talk.links), MOST_ROUNDS):
        _measure(talk, survey, targets, pairs)
    usual = statistics.median(survey.mbps.values()) if survey.mbps else 0.0
    odd = {pair for pair, mbps in survey.mbps.items() if mbps * AGAIN_FACTOR < usual}
    for pairs in rounds(list(talk.links), MOST_ROUNDS):
        _measure(talk, survey, targets, [pair for pair in pairs if pair in odd])


def _measure(talk: _Talk, survey: Survey, targets: Mapping[str, list[Target]], pairs: list[tuple[str, str]]) -> None:
    ways = {pair: way for pair in pairs if (way := _way(survey, targets, pair))}
    requests = {
        pair[0]: {"do": "measure", "target": target, "seconds": MEASURE_S} for pair, (target, _) in ways.items()
    }
    answers = talk.ask(requests)
    for pair, (_, attempt) in ways.items():
        mbps = answers.get(pair[0], {}).get("mbps")
        if mbps is not None:
            survey.mbps[pair] = max(float(mbps), survey.mbps.get(pair, 0.0))
        if attempt.latency_ms is not None:
            survey.latency_ms[pair] = attempt.latency_ms


def _way(survey: Survey, targets: Mapping[str, list[Target]], pair: tuple[str, str]) -> tuple[Target, Attempt] | None:
    """Where the first of a pair reached the second: at the chosen address, or at any."""
    reached = [attempt for attempt in survey.reach.get(pair, ()) if attempt.result == "ok"]
    chosen = survey.chosen.get(pair[1], ("", ""))[1]
    reached.sort(key=lambda attempt: attempt.address != chosen)
    for attempt in reached[:1]:
        return next(target for target in targets[pair[1]] if target["address"] == attempt.address), attempt
    return None


def _try_port(talk: _Talk, survey: Survey) -> None:
    """Whether the first machine could listen on the port that the job names, and the others reach it there."""
    host, port = survey.hosts[0], survey.needs.port
    address = survey.chosen.get(host, ("", ""))[1]
    if not (port and address and host in talk.links):
        return
    answer = talk.ask({host: {"do": "listen", "addresses": [address], "port": port}}).get(host, {})
    told = answer.get("listeners", {}).get(address, {})
    if "error" in told:
        holder = told.get("holder")
        survey.port_errors[host] = str(told["error"]) + (f", by {holder}" if holder else "")
    elif told:
        request = {"do": "connect", "targets": [{"address": address, **told}], "timeout_s": CONNECT_S}
        answers = talk.ask({other: request for other in talk.links if other != host})
        results = {other: Attempt.read(answer["attempts"][0]).result for other, answer in answers.items()}
        lost = [f"{other} does not reach it ({result})" for other, result in results.items() if result != "ok"]
        if lost:
            survey.port_errors[host] = "; ".join(lost)
    talk.ask({host: {"do": "unlisten"}})


def matrix(survey: Survey, values: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Pairs as nested tables, for scripts."""
    return {
        one: {two: values[one, two] for two in survey.hosts if (one, two) in values}
        for one in survey.hosts
        if any((one, two) in values for two in survey.hosts)
    }
