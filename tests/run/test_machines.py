"""The states of a launched run's machines, each event in each state; and where the later starts of a run go on from."""

import time
from dataclasses import replace

import pytest

from manyhands.cluster.agents.machines import SOON_UPDATES, Machines, MachineState, RunMachine
from manyhands.cluster.agents.protocol import RunOpened
from manyhands.cluster.agents.supervise import WatchHooks
from manyhands.cluster.failures import Ending
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import CallResult, RequestFailed
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.records import PROCESS_ENDED, Failure, append, read_lines
from manyhands.core.run_folder import RunFolder
from manyhands.core.timeouts import CONTACT_S, EXCLUDED_S, RETRY_LEAST_S, RETRY_MOST_S, SILENT_S
from manyhands.run import machines as module
from manyhands.run import recovery
from manyhands.run.launch import launch
from manyhands.run.machines import Membership
from manyhands.run.recovery import MOST_IN_VAIN, Restart, RestartHooks, RestartPolicy, run_to_end, worth_restarting
from tests.report.fake_run import step_record

FACTS = {"name": "n3"}


class FakeLink:
    """The launcher's end of a connection to an agent that is not there."""

    def __init__(self, name):
        self.machine, self.here, self.closed = Machine(name), False, False
        self.last_received, self.clock_offset_s = time.monotonic(), 0.0
        self.received, self.calls = [], []

    def post(self, request):
        self.calls.append(request.call.method)
        return len(self.calls)

    def answer(self, value):
        self.received.append((len(self.calls), value))

    def read(self):
        received, self.received = self.received, []
        return received

    def heartbeat(self):
        pass

    flush = heartbeat

    def log_tail(self, _last_lines=8):
        return ""

    def close(self, _patience_s=0.0):
        self.closed = True
        return 255


class Scene:
    """Two machines that take part, n1 and n2, and n3, which the tests lead from state to state."""

    def __init__(self, path, monkeypatch, settings=None):
        self.now, self.said, self.opened = 1000.0, [], []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "open_agent", self.open)
        monkeypatch.setattr(Membership, "_check_facts", lambda *_: None)
        self.folder = RunFolder(path)
        self.folder.failures.mkdir(parents=True)
        self.n1, self.n2, self.n3 = (self.machine(name) for name in ("n1", "n2", "n3"))
        job = load_job(settings or {}, environment={}).job
        self.machines = Machines([self.n1, self.n2, self.n3])
        self.run = Membership(job, self.machines, self.folder, lambda *said: self.said.append(said))
        self.run.record_start(0)

    def machine(self, name):
        opened = RunOpened(f"/runs/{name}", shared=False, checkpoints=True, own=True)
        has = {"facts": dict(FACTS), "processes": 2, "opened_folder": opened}
        return RunMachine(Machine(name), MachineState.RUNNING, link=FakeLink(name), **has)

    def open(self, machine, *_):
        self.opened.append(machine.name)
        return FakeLink(machine.name)

    def wait(self, seconds):
        self.now += seconds
        self.run.tick()

    def lost(self):
        self.n3.link.closed = True
        self.run.record_ending(Ending(lost={"n3": "no message for 16 s"}))

    def contacting(self):
        self.lost()
        self.wait(RETRY_LEAST_S)

    def ready(self):
        self.contacting()
        self.answers_all()

    def running_on_trial(self):
        self.ready()
        self.now += 0.1
        assert self.run.add_ready_machines() == [self.n3]
        self.n3.opened_folder = RunOpened("/runs/n3", shared=False, checkpoints=True)

    def running(self):
        self.n3.joined = False

    def answers(self, *values):
        for value in values:
            self.n3.link.answer(value if isinstance(value, RequestFailed) else CallResult(value))
            self.run.tick()

    def adds_n4(self):
        """What its user hears of it."""
        heard = []
        self.run.add(Machine("n4"), lambda *reported: heard.append(reported))
        self.wait(0)
        return heard

    def trains(self):
        append(self.folder.metrics, step_record(1))

    def closes(self):
        self.n3.link.closed = True
        self.run.tick()

    def answers_all(self):
        self.answers(FACTS, RunOpened("/runs/n3", False, False, False, ""), ("cpu", 4))

    def is_busy(self):
        self.answers(FACTS, RunOpened("/runs/n3", False, False, True, ""))

    def holds_another_run(self):
        self.answers(FACTS, RunOpened("/runs/n3", False, True, False, "abcdef0123"))

    def fails_a_request(self):
        self.answers(RequestFailed("no torch here"))

    def fails(self):
        self.run.record_ending(Ending(failed={4: -9}))

    def fails_again(self):
        self.n3.failures = 1
        self.fails()

    def is_lost_again(self):
        self.n3.failures = 1
        self.lost()

    def raises_on_trial(self):
        self.run.record_ending(Ending(refused=UserError("that is too much for n3")))

    def next_start(self):
        self.run.add_ready_machines()


@pytest.fixture
def scene(tmp_path, monkeypatch):
    return Scene(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize(
    ("state", "event", "then", "until_s"),
    [
        ("running", "fails", MachineState.RUNNING, None),
        ("running", "fails_again", MachineState.READY, EXCLUDED_S),
        ("running", "lost", MachineState.LOST, RETRY_LEAST_S),
        ("running", "is_lost_again", MachineState.LOST, EXCLUDED_S),
        ("running", "closes", MachineState.RUNNING, None),  # what supervises the start says so
        ("running", "next_start", MachineState.RUNNING, None),
        ("lost", RETRY_LEAST_S / 2, MachineState.LOST, RETRY_LEAST_S / 2),
        ("lost", RETRY_LEAST_S, MachineState.CONTACTING, CONTACT_S),
        ("lost", "next_start", MachineState.LOST, RETRY_LEAST_S),
        ("contacting", CONTACT_S / 2, MachineState.CONTACTING, CONTACT_S / 2),
        ("contacting", CONTACT_S + 1, MachineState.LOST, RETRY_MOST_S),
        ("contacting", "answers_all", MachineState.READY, None),
        ("contacting", "closes", MachineState.LOST, RETRY_LEAST_S),
        ("contacting", "is_busy", MachineState.LOST, RETRY_LEAST_S),
        ("contacting", "holds_another_run", "refused", None),
        ("contacting", "fails_a_request", "refused", None),
        ("contacting", "next_start", MachineState.CONTACTING, CONTACT_S),
        ("ready", SILENT_S - 1, MachineState.READY, None),
        ("ready", SILENT_S + 1, MachineState.LOST, RETRY_LEAST_S),
        ("ready", "closes", MachineState.LOST, RETRY_LEAST_S),
        ("ready", "next_start", MachineState.RUNNING, None),
        ("fails_again", EXCLUDED_S / 2, MachineState.READY, EXCLUDED_S / 2),
        ("fails_again", "closes", MachineState.LOST, EXCLUDED_S),
        ("fails_again", "next_start", MachineState.READY, EXCLUDED_S),
        ("running_on_trial", "lost", MachineState.LOST, EXCLUDED_S),  # it was lost before
        ("running_on_trial", "fails", MachineState.READY, EXCLUDED_S),
        ("running_on_trial", "raises_on_trial", "refused", None),
    ],
)
def test_an_event_in_a_state(state, event, then, until_s, scene):
    getattr(scene, state)()
    getattr(scene, event)() if isinstance(event, str) else scene.wait(event)  # so many seconds
    if then == "refused":
        assert scene.n3 not in scene.machines.all
        assert scene.said[-1][0].startswith("n3 can't join: ")
        assert scene.n3.link is None
        return
    assert scene.n3.state is then
    if until_s is not None:
        assert scene.n3.until == pytest.approx(scene.now + until_s)
    assert (scene.n3.link is None) == (then is MachineState.LOST)
    assert (scene.n3 in scene.machines.running) == (then is MachineState.RUNNING)
    assert [scene.n1, scene.n2] == scene.machines.running[:2]


def test_a_machine_that_returns_has_the_last_ranks_and_records_may_differ(scene):
    scene.lost()
    assert [machine.name for machine in scene.machines.running] == ["n1", "n2"]
    assert scene.n3.records_may_differ
    scene.run.record_start(1)
    scene.wait(RETRY_LEAST_S)
    scene.answers_all()
    scene.n1.link.closed = True
    assert scene.run.add_ready_machines() == [scene.n3]
    assert [machine.name for machine in scene.machines.running] == ["n2", "n3"]
    assert scene.n1.state is MachineState.LOST
    assert (scene.n3.processes, scene.n3.device, scene.n3.generation) == (4, "cpu", 0)
    scene.run.record_start(2)
    assert [(one.position, one.generation) for one in (scene.n2, scene.n3)] == [(0, 2), (1, 2)]


def test_the_pause_between_contacts_grows_with_the_time_that_a_machine_is_lost(scene):
    scene.lost()
    pauses = []
    for _ in range(200):
        scene.wait(max(0.0, scene.n3.until - scene.now))
        scene.closes()
        pauses.append(scene.n3.until - scene.now)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (RETRY_LEAST_S, RETRY_MOST_S)


def test_a_machine_that_cannot_be_spared_is_not_excluded(tmp_path, monkeypatch):
    scene = Scene(tmp_path / "run", monkeypatch, {"cluster.elastic": "3:3"})
    scene.fails_again()
    assert scene.n3.state is MachineState.RUNNING


def test_two_machines_lost_at_once_are_both_contacted(scene):
    for machine in (scene.n2, scene.n3):
        machine.link.closed = True
    scene.run.record_ending(Ending(lost={"n2": "", "n3": ""}))
    assert scene.machines.running == [scene.n1]
    assert scene.run.shortage_reason() == ""
    scene.wait(RETRY_LEAST_S)
    assert scene.opened == ["n2", "n3"]


def test_a_restart_waits_for_a_machine_that_is_about_to_be_ready(scene):
    scene.ready()
    scene.trains()
    assert scene.run.joining_next() == ["n3"]
    scene.n2.link.closed = True
    scene.run.add_ready_machines()
    scene.n3.exclude(0.0)
    scene.wait(RETRY_LEAST_S)
    assert scene.run.joining_next() == ["n3"]
    scene.n2.link.answer(CallResult(FACTS))
    scene.run.tick()
    assert scene.run.joining_next() == []


def test_what_fails_once_a_machine_on_trial_has_trained_is_not_its_fault(scene):
    scene.running_on_trial()
    scene.run.record_start(1)
    assert scene.run.newly_joined() == ["n3"]
    scene.trains()
    assert scene.run.newly_joined() == []
    scene.raises_on_trial()
    assert scene.n3 in scene.machines.running


def test_another_launcher_takes_over(tmp_path, monkeypatch):
    scene = Scene(tmp_path / "run", monkeypatch)
    scene.run.term = 3
    scene.contacting()
    scene.answers(FACTS, RunOpened("/runs/n3", False, True, False, "", term=4))
    assert scene.n3.state is MachineState.LOST
    assert scene.run.replaced_on == "n3"
    assert scene.run.regroups()
    assert scene.run.shortage_reason() == "another launcher has taken over the run on n3"


def test_a_machine_that_the_user_adds(scene):
    with pytest.raises(UserError, match="already part of the run"):
        scene.run.add(Machine("n2"), pytest.fail)
    heard = scene.adds_n4()
    with pytest.raises(UserError, match="rejoins the run as soon as it answers"):
        scene.run.add(Machine("n4"), pytest.fail)
    assert scene.opened == ["n4"]
    n4 = scene.machines.all[-1]
    n4.link.closed = True
    scene.run.tick()
    assert n4 not in scene.machines.all  # it was never there
    [(text, takes_part)] = heard
    assert text.startswith("n4 can't join: ")
    assert not takes_part
    waits = scene.adds_n4()
    scene.run.close()
    assert waits == [("the run ended before n4 joined", False)]
    assert scene.machines.all[-1].link is None


def test_an_added_machine_belongs_to_the_job_from_its_first_start_on_even_when_it_is_lost(scene):
    heard = scene.adds_n4()
    n4 = scene.machines.all[-1]
    for value in (FACTS, RunOpened("/runs/n3", False, False, False, ""), ("cpu", 4)):
        assert scene.run.added_machines == []
        n4.link.answer(CallResult(value))
        scene.run.tick()
    scene.run.add_ready_machines()
    n4.opened_folder = scene.n1.opened_folder
    scene.run.record_start(1)
    assert heard == [(f"n4 has joined {scene.folder.path}", True)]
    n4.link.closed = True
    scene.run.record_ending(Ending(lost={"n4": ""}))
    assert scene.run.added_machines == [Machine("n4")]
    scene.run.close()
    assert len(heard) == 1


def test_a_refused_machine_that_is_added_again_keeps_what_is_known_of_it(scene):
    scene.contacting()
    scene.fails_a_request()
    assert scene.n3 not in scene.machines.all
    scene.run.add(Machine("n3"), lambda *_: None)
    assert scene.machines.all[-1] is scene.n3
    assert (scene.n3.state, scene.n3.generation, scene.n3.records_may_differ) == (MachineState.LOST, 0, True)
    scene.wait(0)
    assert scene.n3.state is MachineState.CONTACTING


def test_a_rank_that_no_machine_has_and_a_tunnel_exclude_nobody(scene):
    scene.n3.failures = 1
    for ending in (*(Ending(failed={rank: -9}) for rank in (6, 99, -1)), Ending(lost_tunnel="the tunnel to n3 ended")):
        scene.run.record_ending(ending)
    assert scene.machines.running == [scene.n1, scene.n2, scene.n3]


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
