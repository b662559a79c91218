"""Where the later starts of a run go on from."""

import time

import pytest

from manyhands.cluster.agents.ending import Ending
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.records import PROCESS_ENDED, Failure, StepMetrics, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.run.launch import launch
from manyhands.run.recovery import (
    MOST_IN_VAIN,
    SOON_UPDATES,
    Recovery,
    RestartBudget,
    RunMachines,
    Setbacks,
    failed_rank,
    worth_a_start,
)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.failures.mkdir(parents=True)
    (folder.checkpoints / "step-00000010").mkdir(parents=True)  # of an earlier run in the same folder
    return folder


@pytest.mark.parametrize("named", ["auto", "never", "runs/other"])
def test_what_the_user_names_holds_until_this_run_has_saved(folder, named):
    recovery = Recovery(load_job({"checkpoint.resume": named}, environment={}).job, folder, lambda *_: None)
    starts = [(recovery.number, recovery.job.checkpoint.resume)]
    while recovery.again(Ending(failed={0: -9})):
        starts.append((recovery.number, recovery.job.checkpoint.resume))
        if recovery.number == 1:
            (folder.checkpoints / "step-00000020").mkdir()
    assert starts == [(0, named), (1, named), *((number, "auto") for number in range(2, 2 + MOST_IN_VAIN))]


def test_a_run_that_does_not_recover_has_one_start(folder):
    recovery = Recovery(load_job({"cluster.elastic": "off"}, environment={}).job, folder, lambda *_: None)
    assert not recovery.again(Ending(failed={0: -9}))


@pytest.mark.parametrize("word", ["sometimes", "4:2", "0", "2:", ":3", "1:2:3", "99999"])
def test_what_elastic_may_be_is_said_in_one_sentence(word):
    with pytest.raises(UserError, match="should be on, off, a minimum number of machines"):
        load_job({"cluster.elastic": word}, environment={})


@pytest.mark.parametrize(("word", "hosts"), [("3:4", 2), ("1:2", 3)])
def test_fewer_or_more_machines_than_are_wanted_begin_nothing(word, hosts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = load_job({"cluster.elastic": word}, environment={}).job
    with pytest.raises(UserError, match=f"--elastic {word} does not allow {hosts} machines"):
        launch(job, [Machine(f"n{number}") for number in range(hosts)], quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_machine_that_fails_again_soon_is_set_aside_for_longer_and_longer_until_it_was_of_use():
    setbacks, step, pauses = Setbacks(), 100, []
    for made in (3, 0, 5, 1, 0, 19, SOON_UPDATES, 2):
        setbacks.begin(["n1", "n3"], step)
        step += made
        setbacks.begin(["n1", "n3"], step)  # a start for another reason
        pauses.append(setbacks.fails("n3", step))
        step += 1000  # while it is away
    assert pauses == [0, 5, 10, 20, 40, 60, 0, 5]
    assert setbacks.fails("n1", step) == 0


def test_no_machine_is_set_aside_for_a_tunnel_that_has_ended():
    assert failed_rank(Ending(cut="the ssh tunnel to n2 ended")) is None
    assert failed_rank(Ending(lost={"n2": "no message for 30 s"})) is None
    assert failed_rank(Ending(failed={3: -9})) == 3
    assert failed_rank(Ending()) is None


class Coming(RunMachines):
    def __init__(self, trial):
        self.trial = trial

    def on_trial(self):
        return self.trial

    def coming(self):
        return ["n4"]


def test_a_start_for_a_machine_that_comes_is_no_fault(folder):
    recovery = Recovery(load_job({}, environment={}).job, folder, lambda *_: None, Coming([]))
    stopped = Ending(returned={0: {"status": "stopped"}}, regrouped=True)
    assert all(recovery.again(stopped) for _ in range(2 * MOST_IN_VAIN))
    assert {line["kind"] for line in read_lines(folder.events)} == {"regrouped"}
    assert not recovery.again(Ending(returned={0: {"status": "finished"}}, regrouped=True))
    assert not recovery.again(Ending(returned={0: {"status": "stopped"}}, regrouped=True, interrupted=1))
    assert not recovery.again(Ending(returned={0: {"status": "stopped"}}))


@pytest.mark.parametrize(
    ("step", "each_s", "worth"),
    [(10, 0.1, True), (55, 0.1, False), (99, 0.1, False), (97, 60.0, True), (98, 60.0, True), (99, 60.0, False)],
)
def test_nobody_is_taken_up_for_the_last_seconds_of_a_run_nor_for_an_update_that_goes_on(step, each_s, worth, folder):
    assert not worth_a_start(folder)
    for done in range(step - 3, step + 1):
        append(
            folder.metrics,
            StepMetrics(
                time=done * each_s, epoch=0, step=done, step_in_epoch=done, steps_per_epoch=100, total_steps=100,
                loss=1.0, top1=0.5, learning_rate=0.1, images_per_s=9.0, samples=9,
            ),
        )  # fmt: skip
    assert worth_a_start(folder) == worth


def test_what_fails_with_a_machine_that_has_just_come_does_not_end_the_run(folder):
    refused = Ending(refused=UserError("that is too much for n4"))
    assert Recovery(load_job({}, environment={}).job, folder, lambda *_: None, Coming(["n4"])).again(refused)
    (line,) = read_lines(folder.events)
    assert line["message"] == "the start with n4 failed (that is too much for n4): restarting from step 10"
    assert not Recovery(load_job({}, environment={}).job, folder, lambda *_: None, Coming([])).again(refused)


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
    budget = RestartBudget(folder)
    for number, (at, line, error, rank) in enumerate(failures):
        step = 100 * (number + 1)
        append(folder.metrics, StepMetrics(
            time=time.time() + 9, epoch=0, step=step, step_in_epoch=1, steps_per_epoch=9, total_steps=999,
            loss=1.0, top1=0.5, learning_rate=0.1, images_per_s=9.0, samples=9,
        ))  # fmt: skip
        (folder.checkpoints / f"step-{step:08}").mkdir()
        why = budget.spend(failure(at, line, step, error, rank), script=False)
        assert bool(why) == (number == ends_at)
        if why:
            assert why == "the same error 3 times within 10 minutes: not restarting"
            return
    assert ends_at is None
