"""A process that fails at the worst moment costs one update at most, and leaves nothing behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manyhands.core.errors import EXIT_SAVED
from tests.e2e.command import (
    QUICKLY,
    assert_one_screen,
    done,
    events,
    final_weights,
    finish,
    forked,
    marked,
    training,
    wait_until,
    words,
)
from tests.e2e.test_bad_input import pictures

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
    ("in backward", "backward", "", 1),
    ("in BatchNorm's all-reduce in backward", "norm in backward", GLOO, 1),
    ("in a thread of powersgd", "thread", POWERSGD, 1),
    ("in the gradients' sum through memory", "shared memory", "", 1),
    ("in the gradients' all-reduce", "all-reduce", GLOO, 1),
    ("in BatchNorm's sum in backward", "norm in backward", "", 1),
    ("where running statistics are agreed on", "norm statistics", GLOO, 1),
    ("in an evaluation", "evaluation", EVALUATES, 0),
    ("in an evaluation that rank 0 leads", "evaluation", EVALUATES, 1),
    ("while it saves", "saving", OFTEN, 0),
    ("in a thread of local steps", "thread", LOCAL, 1),
]
# One of them is fast.
CASES = [
    pytest.param(*one, id=name, marks=[pytest.mark.slow] * (number > 0)) for number, (name, *one) in enumerate(PLACES)
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights that a run which nothing befalls comes to, by its options."""
    found = {}

    def of(options):
        if options not in found:
            folder = tmp_path_factory.mktemp("whole")
            done(JOB, options, "-n 2 --out run", cwd=folder)
            found[options] = final_weights(folder / "run")
        return found[options]

    return of


@pytest.mark.parametrize(("place", "options", "rank"), CASES)
def test_a_process_killed_at_the_worst_moment_costs_one_update_at_most(place, options, rank, here, whole):
    again, resumed, made = fault_in(here, place, options, rank)
    assert resumed["step"] >= made - 1
    assert again["time"] - (here / "marker").stat().st_mtime < LEAVE_S
    assert_alike(final_weights("run"), whole(options))


@pytest.mark.slow
def test_a_save_that_takes_long_and_gets_on_is_waited_for(here):
    again, resumed, made = fault_in(here, "backward", "", 1, FAULT_SAVE_S="15")
    assert resumed["step"] == made
    assert again["time"] - (here / "marker").stat().st_mtime > 15


@pytest.mark.slow
@pytest.mark.parametrize(("place", "options"), [("backward", ""), ("backward", GLOO), ("saving", OFTEN)])
def test_a_process_that_stands_still_writes_nothing_later(place, options, here, whole):
    again, resumed, made = fault_in(here, place, options, 0, how="SIGSTOP")
    assert "and was killed" in again["message"]
    assert resumed["step"] >= made - 1
    assert_alike(final_weights("run"), whole(options))


@pytest.mark.slow
def test_processes_that_stand_still_elsewhere_write_nothing_later_either(here, whole):
    """Runs beside each other: nearly all of their time is a wait for a sign of life."""
    places = {
        "all-reduce": (GLOO, 1),
        "norm in backward": (GLOO, 1),
        "stepped": ("", 1),
        "evaluation": (EVALUATES, 0),
        "thread": (POWERSGD, 1),
    }
    started = {
        place: begin_fault(here / place, place, options, rank, how="SIGSTOP")
        for place, (options, rank) in places.items()
    }
    ended = {place: finish(process) for place, process in started.items()}
    for place, (options, _) in places.items():
        again, resumed, made = found_after(here / place, ended[place])
        assert "and was killed" in again["message"], place
        assert resumed["step"] >= made - 1, place
        assert_alike(final_weights(here / place / "run"), whole(options))


def fault_in(here, place, options, rank, **more):
    """A run that something befalls once; the events that tell of it, and the updates that were made by then."""
    return found_after(here, finish(begin_fault(here, place, options, rank, **more)))


def begin_fault(here, place, options, rank, *, how="SIGKILL", **more):
    fault = {"FAULT_AT": place, "FAULT_RANK": str(rank), "FAULT_STEP": "7", "FAULT_HOW": how}
    here.mkdir(exist_ok=True)
    return forked(
        *words([JOB, options, "-n 2 --out", here / "run"]), FAULT_MARKER=str(here / "marker"), **fault, **more
    )


def found_after(here, ended):
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
@pytest.mark.parametrize("again", [False, True], ids=["a new run", "a run that goes on"])
def test_of_several_heads_at_once_one_is_obeyed(again):
    job = f"{DATA} --epochs 100000 --out run"
    if again:
        done(job, "--set train.max_steps=3")
    line = "resume run --epochs 100000 --set train.max_steps=0" if again else job
    with contextlib.ExitStack() as stack:
        heads = [stack.enter_context(training(line)) for _ in range(3)]
        wait_until(lambda: sum(head.poll() is None for head in heads) == 1)
        (obeyed,) = [head for head in heads if head.poll() is None]
        wait_until(lambda: events("run", "first-step")[again:] or events("run", "resumed"), obeyed)
        obeyed.send_signal(signal.SIGTERM)
        ended = {head: finish(head) for head in heads}
    assert ended.pop(obeyed).code == EXIT_SAVED
    for refused in ended.values():
        assert refused.code == 2
        assert "manyhands: a run is active in run\n" in refused.err
        assert_one_screen(refused.err)


@pytest.mark.slow
def test_loader_processes_of_earlier_starts_leave_nothing(here):
    """MANYHANDS_TEST_KILLS=50 for the whole of it."""
    kills = int(os.environ.get("MANYHANDS_TEST_KILLS", "6"))
    pictures(here / "pictures/a", 40)
    pictures(here / "pictures/b", 41)
    job = "train pictures mlp --data.image-size 10 --batch 4 --epochs 100000 --out run --lr 1e-6 -n 2"
    decoding = f"--data.workers 2 --set data.memory_limit_mib=0 {QUICKLY}"
    trained, pids, open_files = Path("run/metrics.jsonl"), set(), []
    with training(job, decoding) as process:
        for number in range(kills):
            wait_until(lambda at=number: len(events("run", "resumed")) == at, process)
            size = trained.stat().st_size if trained.exists() else 0
            wait_until(lambda before=size: trained.exists() and trained.stat().st_size > before, process)
            (agent,) = psutil.Process(process.pid).children()
            ours = agent.children(recursive=True)
            assert len(ours) <= 2 + 2 * 2 * 2  # two that train, and of each two that decode for that, and to evaluate
            pids |= {one.pid for one in ours}
            open_files.append(agent.num_fds())
            sorted(agent.children(), key=lambda one: one.pid)[number % 2].kill()
            wait_until(lambda those=ours: not any(one.is_running() for one in those), process)
        wait_until(lambda: len(events("run", "resumed")) == kills, process)
        process.send_signal(signal.SIGTERM)
        ended = finish(process)
    assert ended.code == EXIT_SAVED, ended.err
    assert max(open_files) <= open_files[0] + 20, open_files  # a start has some twenty
    shared = [one.name for one in Path("/dev/shm").iterdir() if pids & set(map(int, re.findall(r"\d+", one.name)))]
    assert not shared
    assert not marked(str(here))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["moved", "deleted"])
@pytest.mark.parametrize("every", ["1steps", "20steps"])
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
        ended = finish(process)
    assert ended.code == EXIT_SAVED, ended.err
    assert f"run was {what}" in ended.err
    assert "no checkpoint at step" not in ended.err
    step = events(here / "run", "stopped")[-1]["step"]
    done(f"resume run --set train.max_steps={step + 1}")


@pytest.mark.parametrize("hard", [True, False])
def test_too_few_open_files_are_said_in_one_sentence_or_the_limit_is_raised(hard, here):
    limit = "ulimit -n 18" if hard else "ulimit -S -n 18"
    line = f"train digits mlp --epochs 1 -n 1 {QUICKLY}"
    ended = subprocess.run(
        ["bash", "-c", f'{limit}; exec "$@"', "bash", sys.executable, "-m", "manyhands", *line.split()],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == (2 if hard else 0), ended.stderr
    if hard:
        assert_one_screen(ended.stderr)
        assert "but the limit is 18" in ended.stderr
