"""Faults of a drill that befall whole machines, their links, and the head."""

import time
from collections.abc import Callable, Sequence

from manyhands.core.errors import EXIT_DOCTOR, RunError
from manyhands.run.drill_attempt import EVERY_UPDATES, PATIENCE_S, DrilledRun
from manyhands.run.drill_faults import Fault, ended_with, undisturbed
from manyhands.run.drill_hosts import Hosts, no_hosts
from manyhands.run.drill_jobs import refused

# What is promised of all that a head has started, once it is gone.
STOP_S = 20.0


def _until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for it. RunError: it doesn't come true."""
    until = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until:
            raise RunError(f"{what} within {patience_s:.0f} s")
        time.sleep(0.05)


def _while_it_crawls(disturb: Callable[[DrilledRun, Hosts, str], None], count: int = 3) -> Callable[[DrilledRun], None]:
    """Begins on so many machines, makes few updates while something is done to one of them, and goes on to its end."""

    def act(attempt: DrilledRun) -> None:
        assert attempt.plant
        assert attempt.hosts
        attempt.machines = attempt.hosts.names[:count]
        attempt.start()
        attempt.wait_for_fault()
        disturb(attempt, attempt.hosts, attempt.machines[attempt.plant.call % count])
        attempt.plant.go.touch()
        attempt.wait()

    return act


def _restarted(attempt: DrilledRun) -> None:
    _until(lambda: attempt.events("restarted"), "it did not go on without the machine")


def _regrouped(attempt: DrilledRun) -> None:
    _until(lambda: attempt.events("regrouped"), "the machine was not taken up")


def _kill(attempt: DrilledRun, hosts: Hosts, name: str) -> None:
    hosts.kill(name)
    _restarted(attempt)


def _kill_and_revive(attempt: DrilledRun, hosts: Hosts, name: str) -> None:
    _kill(attempt, hosts, name)
    hosts.revive(name)
    _regrouped(attempt)


def _cut(attempt: DrilledRun, hosts: Hosts, name: str) -> None:
    """For good: what runs there has to end by itself; a session of its sshd may wait for hours."""
    hosts.cut(name)
    _restarted(attempt)
    _until(lambda: not _ours(attempt, hosts, name), "what runs behind the cut had not ended", 2 * STOP_S)
    hosts.kill(name)


def _ours(attempt: DrilledRun, hosts: Hosts, name: str) -> list[int]:
    there = hosts.processes(name)
    return [one.pid for one in attempt.left() if one.pid in there and one.name() != "cat"]


def _cut_shortly(_attempt: DrilledRun, hosts: Hosts, name: str) -> None:
    hosts.cut(name)
    time.sleep(8)
    hosts.mend(name)


def _cut_longer(attempt: DrilledRun, hosts: Hosts, name: str) -> None:
    hosts.cut(name)
    time.sleep(25)
    hosts.mend(name)
    _regrouped(attempt)


def _join(attempt: DrilledRun, hosts: Hosts, _name: str) -> None:
    head = attempt.process
    attempt.command("join", str(attempt.run.path), "--host", hosts.names[-1])
    attempt.wait()
    if attempt.code:
        raise RunError(f"join ended with {attempt.code}")
    attempt.process = head
    _regrouped(attempt)


def _trained_on(count: int) -> Callable[[DrilledRun], str]:
    """Judges how many machines the run ended on."""

    def judge(attempt: DrilledRun) -> str:
        last = attempt.events("started")[-1]["data"]["processes"]
        return ended_with(attempt) or ("" if last == count else f"it ended on {last} machines, not {count}")

    return judge


def _kill_head(attempt: DrilledRun) -> None:
    attempt.start()
    attempt.wait_for_fault()
    assert attempt.process
    assert attempt.plant
    attempt.process.kill()
    attempt.plant.go.touch()
    _until(lambda: not attempt.left(), "not all had stopped", STOP_S)
    attempt.command("resume", str(attempt.run.path))
    attempt.wait()


def _changed_key(attempt: DrilledRun) -> None:
    """Another machine answers by the name of one that is known."""
    assert attempt.hosts
    known = attempt.hosts.folder / "known"
    first, second, *others = known.read_text().splitlines()
    known.write_text("\n".join([f"{first.split()[0]} {second.partition(' ')[2]}", second, *others]) + "\n")
    attempt.machines = attempt.hosts.names
    attempt.start()
    attempt.wait()


ALL_AGAIN = "is taken up again, at most one update made twice"


def _on_machines(row: int, name: str, does: str, expected: str, count: int, act: Callable[[DrilledRun], None]) -> Fault:
    judge = _trained_on(count)
    return Fault(row, name, does, expected, judge, plants="crawl", rank=0, act=act, lacks=no_hosts, machines=True)


MACHINE_FAULTS: Sequence[Fault] = (
    _on_machines(3, "kill-machine", "one of three machines dies", "the others go on", 2, _while_it_crawls(_kill)),
    _on_machines(4, "machine-returns", "it dies, and comes back", ALL_AGAIN, 3, _while_it_crawls(_kill_and_revive)),
    _on_machines(
        5, "join", "a third machine joins two", "takes part from the next update on", 3, _while_it_crawls(_join, 2)
    ),
    Fault(
        7,
        "kill-head",
        "the program that was typed is killed, and resumed",
        f"all stop within {STOP_S:.0f} s, and it goes on from the last checkpoint",
        ended_with,
        plants="wait",
        act=_kill_head,
        most_lost=EVERY_UPDATES,
    ),
    _on_machines(
        8, "cut-link", "a link is cut for good", "the others go on, what is behind it stops", 2, _while_it_crawls(_cut)
    ),
    Fault(
        9,
        "cut-link-8s",
        "a link is cut for 8 s",
        "no new start",
        undisturbed,
        plants="crawl",
        rank=0,
        act=_while_it_crawls(_cut_shortly),
        lacks=no_hosts,
        machines=True,
    ),
    _on_machines(10, "cut-link-25s", "a link is cut for 25 s", ALL_AGAIN, 3, _while_it_crawls(_cut_longer)),
    Fault(
        27,
        "changed-key",
        "a machine's ssh key has changed",
        "refused with one line",
        refused("knows another one", EXIT_DOCTOR),
        act=_changed_key,
        lacks=no_hosts,
        equal=False,
        machines=True,
    ),
)
