"""Where the later starts of a run go on from."""

import time
from dataclasses import replace

import pytest

from manyhands.cluster.agents.machines import SOON_UPDATES, RunMachine
from manyhands.cluster.agents.supervise import WatchHooks
from manyhands.cluster.failures import Ending
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.records import PROCESS_ENDED, Failure, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.run import recovery
from manyhands.run.launch import launch
from manyhands.run.recovery import MOST_IN_VAIN, Restart, RestartHooks, RestartPolicy, run_to_end, worth_restarting
from tests.report.fake_run import step_record


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.failures.mkdir(parents=True)
    (folder.checkpoints / "step-00000010").mkdir(parents=True)  # of an earlier run in the same folder
    return folder


def policy(folder, settings=None):
    return RestartPolicy(load_job(settings or {}, environment={}).job, folder, lambda *_: None)


@pytest.mark.parametrize("named", ["auto", "never", "runs/other"])
def test_what_the_user_names_holds_until_this_run_has_saved(folder, named, monkeypatch):
    monkeypatch.setattr(recovery, "supervise_once", lambda *_: Ending(failed={0: -9}))
    starts = []

    def orders(job, number):
        starts.append((number, job.checkpoint.resume))
        if number == 1:
            (folder.checkpoints / "step-00000020").mkdir()
        return {}

    job = load_job({"checkpoint.resume": named}, environment={}).job
    run_to_end(job, folder, RestartHooks(), orders, WatchHooks(), lambda *_: None)
    assert starts == [(0, named), (1, named), *((number, "auto") for number in range(2, 2 + MOST_IN_VAIN))]


def test_fewer_or_more_machines_than_are_wanted_begin_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("sometimes", "4:2", "0", "2:", ":3", "1:2:3", "99999"):
        with pytest.raises(UserError, match="should be on, off, a minimum number of machines"):
            load_job({"cluster.elastic": word}, environment={})
    for word, hosts in (("3:4", 2), ("1:2", 3)):
        job = load_job({"cluster.elastic": word}, environment={}).job
        with pytest.raises(UserError, match=f"--elastic {word} does not allow {hosts} machines"):
            launch(job, [Machine(f"n{number}") for number in range(hosts)], quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_machine_that_fails_again_soon_is_set_aside_for_longer_and_longer_until_it_was_of_use():
    machine, other, step, pauses = RunMachine(Machine("n3")), RunMachine(Machine("n1"), since_step=100), 100, []
    for made in (3, 0, 5, 1, 0, 19, SOON_UPDATES, 2):
        machine.since_step, step = step, step + made
        pauses.append(machine.count_failure(step))
        machine.exclude(0.0)
        step += 1000  # while it is away
    assert pauses == [0, 5, 10, 20, 40, 60, 0, 5]
    assert machine.since_step is None
    assert other.count_failure(step) == 0


class Joining(RestartHooks):
    def __init__(self, trial=()):
        self.trial = trial

    def newly_joined(self):
        return [*self.trial]

    def joining_next(self):
        return ["n4"]


def test_a_start_for_a_machine_that_comes_is_no_fault(folder):
    decides, stopped = policy(folder), Ending(returned={0: {"status": "stopped"}}, regrouped=True)
    restarts = [decides.next_restart(stopped, Joining()) for _ in range(2 * MOST_IN_VAIN)]
    assert set(restarts) == {Restart("regrouped", "n4 can join")}
    for changed in ({"returned": {0: {"status": "finished"}}}, {"interrupted": 1}, {"regrouped": False}):
        assert not decides.next_restart(replace(stopped, **changed), Joining())
    decides = policy(folder, {"cluster.elastic": "off"})
    assert not decides.next_restart(Ending(failed={0: -9}), RestartHooks())


@pytest.mark.parametrize(
    ("step", "each_s", "worth"),
    [(10, 0.1, True), (55, 0.1, False), (99, 0.1, False), (97, 60.0, True), (98, 60.0, True), (99, 60.0, False)],
)
def test_no_machine_joins_in_the_last_seconds_of_a_run_or_during_an_update(step, each_s, worth, folder):
    assert not worth_restarting(folder)
    for done in range(step - 3, step + 1):
        append(folder.metrics, step_record(done, done * each_s, total_steps=100))
    assert worth_restarting(folder) == worth


def test_what_fails_with_a_machine_that_has_just_come_does_not_end_the_run(folder, monkeypatch):
    refused = Ending(refused=UserError("that is too much for n4"))
    endings = iter([refused, Ending(returned={0: {"status": "finished"}})])
    monkeypatch.setattr(recovery, "supervise_once", lambda *_: next(endings))
    job = load_job({}, environment={}).job
    assert run_to_end(job, folder, Joining(["n4"]), lambda *_: {}, WatchHooks(), lambda *_: None).ok
    (line,) = read_lines(folder.events)
    assert line["message"] == "starting with n4 failed (that is too much for n4): restarting from step 10"
    assert not policy(folder).next_restart(refused, Joining())


def failure(at, line, step, error="KeyError", rank=0):
    traceback = f'Traceback\n  File "net.py", line {line}, in forward\n    x\n{error}: {step}\n'
    return Failure(
        time=at, rank=rank, host="", pid=1, step=step, error=error, what=f"{error}: {step}", traceback=traceback
    )


@pytest.mark.parametrize(
    ("failures", "ends_at"),
    [
        ([(n * 2.0, 7, "KeyError", 0) for n in range(5)], 2),  # a loop of restarts that each make progress
        ([(n * 2.0, 7, "KeyError", n % 2) for n in range(5)], 2),  # on whichever rank
        ([(n * 2.0, 7 + n, "KeyError", 0) for n in range(5)], None),  # at another line each time
        ([(n * 2.0, 7, ("KeyError", "OSError")[n % 2], 0) for n in range(5)], 4),
        ([(n * 301.0, 7, "KeyError", 0) for n in range(5)], None),  # twice within ten minutes
        ([(n * 2.0, 7, PROCESS_ENDED, 0) for n in range(5)], None),  # from outside
    ],
)
def test_the_same_error_at_the_same_line_three_times_ends_the_run(failures, ends_at, folder):
    decides = policy(folder)
    for number, (at, line, error, rank) in enumerate(failures):
        step = 100 * (number + 1)
        append(folder.metrics, step_record(step, time.time() + 9))
        (folder.checkpoints / f"step-{step:08}").mkdir()
        why = decides.count_fault(failure(at, line, step, error, rank))
        assert bool(why) == (number == ends_at)
        if why:
            assert why == "the same error 3 times within 10 minutes: not restarting"
            return
    assert ends_at is None
