"""A run that a fault hits goes on: at most one update is lost, the weights are the same, and nothing is left behind."""

import contextlib
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from manyhands.core.errors import EXIT_SAVED
from manyhands.train.saver import best_save_interval
from tests.data.sets import make
from tests.e2e import command
from tests.e2e.command import NETS, QUICKLY, done, events, final_weights, finish, marked, start, training, wait_until

pytestmark = pytest.mark.timeout(300)
FAULTS = Path(__file__).with_name("faults.py")
UPDATES = 20
DATA = f"train synthetic:480x1x8x8x10 {FAULTS}:Net {QUICKLY}"
EXACT = "--set train.precision=fp64 --set train.momentum=0"
JOB = f"{DATA} --batch 24 --epochs 2 --set train.max_steps={UPDATES} {EXACT}"
GLOO = "--set parallel.shared_memory=false"
OFTEN = "--set checkpoint.every=1steps"
EVALUATES = "--set train.evaluate_every=0.25 --set train.evaluate_batch=8"
POWERSGD = f"{OFTEN} --sync powersgd --set sync.rank=2"
LOCAL = f"{OFTEN} --sync local --set sync.every=4 --set sync.delay=2 --set sync.codec=int8"
# What survivors may take to leave on a busy machine; they take a tenth of it on one that isn't.
LEAVE_S = 20.0

PLACES = [
    ("after one rank's optimizer step", "stepped", "", 1),
    ("in BatchNorm's all-reduce in backward", "norm in backward", GLOO, 1),
    ("in a thread of powersgd", "thread", POWERSGD, 1),
    ("in the gradients' sum through memory", "shared memory", "", 1),
    ("in the gradients' all-reduce", "all-reduce", GLOO, 1),
    ("in BatchNorm's sum in backward", "norm in backward", "", 1),
    ("where running statistics are agreed on", "norm statistics", GLOO, 1),
    ("in an evaluation that rank 0 leads", "evaluation", EVALUATES, 1),
    ("while it saves", "saving", OFTEN, 0),
    ("in a thread of local steps", "thread", LOCAL, 1),
]
# One of them is fast.
CASES = [pytest.param(*one, id=name, marks=[pytest.mark.slow] * (n > 0)) for n, (name, *one) in enumerate(PLACES)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run without a fault; only a sync method makes other updates."""
    found = {}

    def of(options):
        options = options if "--sync" in options else ""
        if options not in found:
            folder = tmp_path_factory.mktemp("whole")
            done(JOB, options, "-n 2 --out run", cwd=folder)
            found[options] = final_weights(folder / "run")
        return found[options]

    return of


@pytest.mark.parametrize(("place", "options", "rank"), CASES)
def test_a_process_killed_at_the_worst_moment_costs_one_update_at_most(place, options, rank, here, whole):
    again, resumed, made = found_after(here, finish(begin_fault(here, place, options, rank)))
    assert resumed["step"] >= made - 1
    assert again["time"] - (here / "marker").stat().st_mtime < LEAVE_S
    assert_alike(final_weights("run"), whole(options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        [("backward", GLOO, 0), ("saving", OFTEN, 0), ("stepped", "", 1)],
        [("evaluation", EVALUATES, 0), ("thread", POWERSGD, 1)],
    ],
)
def test_a_process_that_stands_still_is_killed_and_writes_nothing_later(places, here, whole):
    """Runs beside each other: nearly all of their time is a wait for a sign of life."""
    folders = [here / str(number) for number in range(len(places))]
    started = [begin_fault(folder, *each, "SIGSTOP") for folder, each in zip(folders, places, strict=True)]
    for folder, process, (_, options, rank) in zip(folders, started, places, strict=True):
        ended = finish(process)
        again, resumed, made = found_after(folder, ended)
        assert re.match(rf"rank {rank} on \S+ was stopped for \d+ s and was killed: restarting from", again["message"])
        assert f"WARNING {again['message']}" in ended.err
        assert resumed["step"] >= made - 1
        assert_alike(final_weights(folder / "run"), whole(options))


def begin_fault(here, place, options, rank, how="SIGKILL"):
    """A run with one fault."""
    fault = {"FAULT_AT": place, "FAULT_RANK": str(rank), "FAULT_STEP": "7", "FAULT_HOW": how}
    here.mkdir(exist_ok=True)
    return command.begin(JOB, options, "-n 2 --out", here / "run", FAULT_MARKER=str(here / "marker"), **fault)


def found_after(here, ended):
    """The events of the fault, and the updates made before it."""
    assert ended.code == 0, ended.err
    assert not marked(str(here))
    (again,), (resumed,) = events(here / "run", "restarted"), events(here / "run", "resumed")
    return again, resumed, int((here / "marker").read_text().split()[1])


def assert_alike(one, other):
    """To rounding, in double precision."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= 1e-9 * other[name].abs().max().clamp_min(1), name


@pytest.mark.slow
def test_one_of_several_launchers_is_obeyed_in_a_new_and_in_an_active_run():
    for line, begun in ((f"{DATA} --epochs 100000 --out run", "first-step"), ("resume run", "resumed")):
        with contextlib.ExitStack() as stack:
            heads = [stack.enter_context(training(line)) for _ in range(3)]
            wait_until(lambda those=heads: sum(head.poll() is None for head in those) == 1)
            (obeyed,) = [head for head in heads if head.poll() is None]
            wait_until(lambda kind=begun: events("run", kind), obeyed)
            obeyed.send_signal(signal.SIGTERM)
            ended = {head: finish(head) for head in heads}
        assert ended.pop(obeyed).code == EXIT_SAVED
        for refused in ended.values():
            assert refused.code == 2
            assert "manyhands: a run is active in run\n" in refused.err
            command.assert_one_screen(refused.err)


def workers_of(process):
    """The processes that train, in the order of their start."""
    (agent,) = psutil.Process(process.pid).children()
    return sorted(agent.children(), key=lambda one: one.pid)


@pytest.mark.slow
def test_loader_processes_of_earlier_starts_leave_nothing(here, request):
    """MANYHANDS_TEST_KILLS=50 for the whole of it."""
    kills = int(os.environ.get("MANYHANDS_TEST_KILLS", "4"))
    temporary = Path(tempfile.mkdtemp())  # short: sockets lie there
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    make(here / "pictures", ("a", "b"), 40, size=(10, 10))
    job = "train pictures mlp --data.image-size 10 --batch 4 --epochs 100000 --out run --lr 1e-6 -n 2"
    decoding = f"--data.workers 2 --set data.memory_limit_mib=0 {QUICKLY}"
    trained, pids, open_files = Path("run/metrics.jsonl"), set(), []
    with training(job, decoding, by=start, TMPDIR=str(temporary)) as process:
        for number in range(kills):
            wait_until(lambda at=number: len(events("run", "resumed")) == at, process)
            size = trained.stat().st_size if trained.exists() else 0
            wait_until(lambda before=size: trained.exists() and trained.stat().st_size > before, process)
            wait_until(lambda: list(temporary.rglob("pymp-*")), process)
            (agent,) = psutil.Process(process.pid).children()
            ours = agent.children(recursive=True)
            assert len(ours) <= 2 + 2 * 2 * 2  # two that train, and of each two that decode for that, and to evaluate
            pids |= {one.pid for one in ours}
            open_files.append(agent.num_fds())
            workers_of(process)[number % 2].kill()
            wait_until(lambda those=ours: all(map(command.has_ended, those)), process)
        wait_until(lambda: len(events("run", "resumed")) == kills, process)
        why = done("why run", by=command.inside).out
        assert f"done: {kills} restarts in all; the last 3:" in why
        assert why.count("done: restarted (") == 3
        command.stop(process)
    assert max(open_files) <= open_files[0] + 20, open_files  # a start has some twenty
    shared = [one.name for one in Path("/dev/shm").iterdir() if pids & set(map(int, re.findall(r"\d+", one.name)))]
    assert not shared
    assert not list(temporary.glob("[!t]*"))
    assert not marked(str(here))


@pytest.mark.slow
@pytest.mark.parametrize(("every", "what"), [("1steps", "deleted"), ("20steps", "moved")])
def test_a_run_folder_moved_or_deleted_while_training_costs_no_update(every, what, here):
    job = "train synthetic:60000x1x8x8x10 mlp --epochs 100000 -n 1 --out run"
    with training(job, QUICKLY, f"--set checkpoint.every={every}") as process:
        wait_until(lambda: events(here / "run", "saved"), process)
        if what == "moved":
            (here / "run").rename(here / "new")
            wait_until(lambda: (here / "run").is_symlink(), process)
            saved = len(events(here / "new", "saved"))
            wait_until(lambda: len(events(here / "new", "saved")) > saved, process)
            process.terminate()
        else:
            # As rm -rf: what can't be removed, since a save adds files meanwhile, is passed over.
            shutil.rmtree(here / "run", ignore_errors=True)
        ended = finish(process, code=EXIT_SAVED, says=f"run was {what}")
    assert "no checkpoint at step" not in ended.err
    step = events(here / "run", "stopped")[-1]["step"]
    done(f"resume run --set train.max_steps={step + 1}")


def test_too_few_open_files_are_refused_in_one_sentence():
    """tests/cluster/test_process_settings.py has limits that can be raised."""
    line = f"ulimit -n 18; exec manyhands train digits mlp --epochs 1 -n 1 {QUICKLY}"
    command.assert_one_screen(finish(command.shell(line), code=2, says="but the limit is 18").err)


THOUSAND = "train synthetic:1000x1x8x8x10"
ONCE = f"{THOUSAND} {NETS}:Killed --batch 50 --epochs 2 {QUICKLY} -n"
LATER = f"{THOUSAND} mlp --batch 50 --epochs 20 {QUICKLY} --out run"


@pytest.fixture
def fault(here):
    """What the environment says of a fault that comes once."""
    return {"FAULT_MARKER": str(here / "marker"), "FAULT_CALL": "13"}


def test_a_killed_process_is_replaced_and_costs_no_update(here, fault):
    """The other one had made the update before, and nothing is trained twice."""
    ended = done(ONCE, "2 --out run", **fault)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert resumed["step"] == again["step"] > 7
    done(ONCE, "2 --out whole", **fault)
    assert not events("whole", "restarted")
    command.assert_equal_weights(final_weights("run"), final_weights("whole"))
    assert "WARNING rank 1 was killed by SIGKILL: restarting from step" in ended.err
    assert not marked(str(here))
    # How often to save is weighed anew after the kill.
    weighed, quiet = (events(name, "interval")[-1]["data"] for name in ("run", "whole"))
    assert (weighed["failures"], quiet["failures"]) == (1, 0)
    assert weighed["between_failures_s"] < quiet["between_failures_s"] / 10
    best = best_save_interval(weighed["save_s"], weighed["between_failures_s"])
    assert weighed["seconds"] == pytest.approx(best, rel=0.01)
    reported, *_, last = done("why run", by=command.inside).out.partition("done: ")
    assert reported.startswith("run finished after")
    assert "why:" not in reported
    assert re.match(r"restarted .*rank 1 was killed by SIGKILL: restarting from step", last)


@pytest.mark.slow
def test_an_exception_that_occurs_once_is_reported_and_costs_no_update(fault):
    done(ONCE.replace("Killed", "RaisesOnce"), "2 --out run", **fault)
    (again,), (resumed,) = events("run", "restarted"), events("run", "resumed")
    assert resumed["step"] == again["step"] > 7
    assert "KeyError" in again["message"]


@pytest.mark.slow
def test_what_fails_before_its_first_update_is_not_tried_again():
    done(f"train digits {NETS}:Missing -n 2 --out run", QUICKLY, code=2)
    assert not events("run", "restarted")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["the only process", "the agent"])
def test_killed_agent_or_only_worker_is_replaced_and_resumes_from_the_last_save(who):
    with training(LATER, "--set checkpoint.every=10steps -n", 1 if who == "the only process" else 2) as process:
        wait_until(lambda: events("run", "saved"), process)
        before = workers_of(process)
        (before[0] if who == "the only process" else before[0].parent()).kill()
        ended = finish(process, code=0)
    (resumed,) = events("run", "resumed")
    assert resumed["step"] >= 10
    if who == "the agent":
        assert "the agent that watches the processes failed: the agent was killed by SIGKILL: restarting" in ended.err
    assert all(map(command.has_ended, before))
