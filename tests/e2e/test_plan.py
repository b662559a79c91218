"""manyhands plan, for one number of machines and over a range: searched, written, shown, verified, timed; shares.

Nothing of the user's is overwritten. All but the last ones in this process.
"""

import json
import math
import subprocess
import sys

import pytest

from manyhands.planner.timing import Timing
from manyhands.run.python import Run
from manyhands.worker.plan_growth import _extrapolate_time
from tests.e2e.command import NETS, QUICK, done, events, finish, inside, read, refused, shell

CNN = "plan synthetic:64x3x16x16x10 cnn --batch 32 --no-measure -n"
MEASURED = "plan synthetic:64x3x16x16x10 cnn --batch 32 -n"
SLOW = "plan synthetic:6400x3x16x16x10 cnn --batch 32 -n 3 --set train.epochs=40 --no-measure"


def plan(*given):
    """What `manyhands plan …` says."""
    return done(*given, by=inside)


def planned(*given):
    """What `manyhands plan … --json` says."""
    return json.loads(plan(*given, "--json").out)


def test_offline_a_table_a_plan_and_a_picture(here):
    ended = plan(CNN, 2)
    assert "data parallel" in ended.out
    assert "is kept" in ended.out or "is chosen" in ended.out
    content = read("plan.json")
    assert (content["format"], content["mesh"]) == ("plan/1", {"dp": 2})
    assert content["reason"] in " ".join(ended.out.split())
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")
    shown = plan("plan plan.json").out
    assert all(words in shown for words in (content["reason"], "gradients"))


def test_a_slow_link_shows_what_agreeing_costs():
    ended = plan(SLOW, "--link 1mbit --json")
    sync = read("plan.json")["sync"]
    assert json.loads(ended.out)["sync"] == sync
    assert (sync["machines"], sync["steps"]) == (3, 40 * 200)
    assert {row["method"] for row in sync["methods"]} == {"allreduce", "bf16", "powersgd", "local"}
    assert [row["method"] for row in sync["methods"] if row["chosen"]] == ["local"]
    assert f"--sync auto would choose another method: {sync['reason']}" in " ".join(ended.err.split())
    asked = plan(SLOW, "--link 1mbit --sync auto --out asked.json")
    (arrow,) = (line for line in asked.out.splitlines() if "→" in line)
    assert "local" in arrow
    assert "use one machine" in plan("plan plan.json").out
    plan(SLOW, "--out fast.json --set sync.link=100gbit")
    assert [row["method"] for row in read("fast.json")["sync"]["methods"] if row["chosen"]] == ["allreduce"]


def test_machines_that_only_ssh_reaches_have_a_slower_link():
    def step_ms(*given):
        rows = planned(SLOW, "--link 1gbit", *given)["candidates"]
        return next(row["step_ms"] for row in rows if row["name"] == "data parallel")

    assert step_ms("--set cluster.interface=ssh --out tunnel.json") > step_ms()


def test_one_table_prices_an_update_once_and_recommends_one_row():
    ended = plan(CNN, "2 --link 10mbit --json")
    (arrow,) = (line for line in ended.err.splitlines() if "→" in line)
    content = json.loads(ended.out)
    (exact,) = (row for row in content["sync"]["methods"] if row["method"] == "allreduce")
    own = [line for line in ended.err.splitlines() if "dp=2" in line and "ssh" not in line]
    (row,) = (line for line in own if "data parallel" in line and "," not in line)
    assert float(row.replace("→", " ").split()[3]) == pytest.approx(exact["step_s"] * 1e3, rel=0.01)
    assert content["recommended"]["plan"] in arrow


def test_shares_of_a_step_are_timed_here():
    plan(MEASURED, "2 --link 10mbit --set train.max_steps=7")
    sync = read("plan.json")["sync"]
    assert sync["steps"] == 7
    assert 0 < sync["compute_s"] < 60
    assert "allreduce" in sync["reason"]
    found = planned(MEASURED, "1..2 --link 10mbit")
    assert found["rows"][0]["compute_ms"] > 0
    assert found["measured"]


def test_numbers_of_machines_up_to_the_batch_and_what_they_cost(here):
    ended = plan(CNN, "1..1024 --link 1gbit --json")
    rows = json.loads(ended.out)["rows"]
    assert [row["processes"] for row in rows] == [1, 2, 3, 4, 8, 16, 32]
    assert "at most 32 machines can share an update" in ended.err
    assert "efficiency" in ended.err, "the table goes where JSON doesn't"
    assert not list(here.iterdir()), "nobody named a file"
    for row in rows:
        assert row["samples"] == math.ceil(32 / row["processes"])
        assert row["images_per_s"] == pytest.approx(32e3 / row["step_ms"], rel=1e-2)
        assert row["epoch_s"] * row["images_per_s"] == pytest.approx(64)
        assert row["process_hours"] * 3600 == pytest.approx(row["processes"] * row["epoch_s"])
        assert row["efficiency"] == pytest.approx(row["images_per_s"] / rows[0]["images_per_s"] / row["processes"])
    # A row is what a plan for so many says.
    (data,) = (one for one in planned(CNN, "4 --link 1gbit")["candidates"] if one["name"] == "data parallel")
    assert (rows[3]["processes"], rows[3]["sync"]) == (4, "allreduce")
    assert rows[3]["step_ms"] == pytest.approx(data["step_ms"], rel=1e-3)
    slow = "3..4 --link 1mbit --set train.epochs=400"
    (*_, usual), (*_, chosen) = (planned(CNN, slow, more)["rows"] for more in ("", "--sync auto"))
    assert (usual["sync"] == "allreduce") > (chosen["sync"] == "allreduce")
    assert chosen["step_ms"] < usual["step_ms"]


def test_existing_files_are_not_overwritten_and_are_reported_before_the_data_is_read(here):
    (here / "plan.png").write_text("mine")
    refused(CNN, "2 --link fast", says="already exists")
    (here / "plan.json").write_text('{"mine": 1}')
    refused(CNN, "2 --force")
    assert (here / "plan.json").read_text() == '{"mine": 1}'
    assert (here / "plan.png").read_text() == "mine"
    for force in ("", "--force"):
        plan(CNN, "2 --out other.json", force)


MISTAKES = [
    (MEASURED, "2 --device-model abacus", "h100"),
    (MEASURED, "2 --device-model t4 --set train.precision=bf16", "fp16"),
    (MEASURED, "1..4 --link 1gbit --device gpu", "this machine has no gpu device"),
    (MEASURED, "2 --link 1gbit --device h100", "--device-model h100"),
    (MEASURED, "2 --link 1gbit --device cuda:99", "this machine has no cuda device"),
    *((CNN, f"2 {words}", "") for words in ("--mesh dp", "--pin n@dp", "--memory 1kB", "--out plan.txt", "--measure")),
    (CNN, "2 --set sync.link=fast", "speed"),
    (CNN, "2 --memory much", "amount"),
    (CNN, "2 --mesh dp=3", "the mesh dp=3 is for 3 processes"),
    (CNN, "2 --pin nothing=n@dp", "the network has no op nothing"),
    (CNN, "2 --pin loss=o@elsewhere", "names the axis elsewhere"),
    (CNN, "1", "two or more processes"),
    (CNN, "64", "train.batch (32) is smaller"),
    ("plan", "no-such-plan.json", ""),
    ("plan", "digits mlp third", ""),
    ("plan", f"digits {NETS}:OneNumber -n 2 --no-measure --pin matmul=h@dp", "has no dimension h"),
    (CNN, "4..1", "is not a number of processes"),
    (CNN, "many", "is not a number of processes"),
    (CNN, "1..8", "need the link speed"),
    (CNN, "1..8 --link 1gbit --mesh dp=2", "--mesh does not apply to a range of processes"),
    (CNN, "1..8 --link 1gbit --out plan.json", "must be a .svg or .png file"),
    (CNN, "64..128 --link 1gbit", "at most 32 machines"),
]


@pytest.mark.parametrize(("command", "words", "says"), MISTAKES, ids=[words for _, words, _ in MISTAKES])
def test_a_mistake_is_one_screen(command, words, says, here):
    assert says in " ".join(refused(command, words, where=bool(says)).split())
    assert not (here / "plan.json").exists()


def test_what_is_no_plan_or_says_nothing_of_its_network_is_refused(here):
    meshed = {"format": "plan/1", "mesh": {"dp": 2}}
    others = [{**meshed, "network": 3, "graph": 4}, {**meshed, "network": {"channels": "x"}, "graph": {"samples": 3}}]
    for content in ("", *map(json.dumps, ([], {"format": "plan/1"}, meshed, *others))):
        (here / "mine.json").write_text(content)
        refused("plan mine.json")


def test_shares_too_long_to_time_lie_on_the_line_of_the_last_two():
    assert _extrapolate_time([(4, Timing(2.0))], 8).seconds == 4
    assert _extrapolate_time([(2, Timing(9.0)), (4, Timing(2.0)), (8, Timing(3.0))], 16).seconds == 5
    # Noise makes no share shorter than a smaller.
    assert _extrapolate_time([(4, Timing(3.0)), (8, Timing(2.0))], 16).seconds == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_measured_then_verified(here):
    ended = done(MEASURED, "2 --verify")
    assert "measured" in ended.out
    assert "computes the same" in ended.err
    # So is a plan by hand, which is timed too.
    (here / "plan.json").write_text(json.dumps({**read("plan.json"), "ops": {"loss": "r@dp", "4": "o@dp"}}))
    ended = done("plan plan.json --verify --measure", says="computes the same")
    assert "data parallel" in ended.out
    assert "ms per update" in ended.out


SHARED = f"train digits mlp --batch 32 --epochs 1 {' '.join(QUICK[:-1])} train.precision=fp64 --out"


@pytest.mark.slow
def test_a_run_with_unequal_shares_shows_them_and_resumes_with_equal_ones_at_another_number(here):
    done(SHARED, "uneven -n 2 --set cluster.shares=[24,8]")
    assert read("uneven/plan.json")["shares"] == [[24, 8]]
    (reported,) = events("uneven", "shares")
    assert reported["data"]["shares"] == [24, 8]
    assert reported["message"] == "shares of the batch of 32 samples, by process: 24, 8"
    assert reported["message"] in done("profile uneven", by=inside).out
    shares = json.loads(done("profile uneven --json", by=inside).out)["shares"]
    assert shares == Run(here / "uneven", "finished").shares == [24, 8]
    ended = done("resume uneven -n 3 --epochs 2", QUICK)
    assert "cluster.shares has 2 number(s) for 3 processes; using equal shares" in ended.err
    assert read("uneven/plan.json")["shares"] == [[10, 11, 11]]


@pytest.mark.parametrize(
    ("shares", "more", "says"),
    [
        ("[24,9]", "", "the sum of cluster.shares [24, 9] is 33, but train.batch is 32"),
        ("[32]", "", "cluster.shares has 1 number(s) for 2 processes"),
        ("[32,0]", "", "cluster.shares: should be machines, equal, auto, or a list of one whole number"),
        pytest.param("[24,8]", "--sync local", "normalizes each process's own", marks=pytest.mark.slow),
        pytest.param("[24,8]", "--parallel semi", "--parallel semi splits each batch", marks=pytest.mark.slow),
        pytest.param("auto", "--parallel fsdp", "their speed can't be measured", marks=pytest.mark.slow),
    ],
)
def test_shares_that_can_not_be_are_refused(shares, more, says):
    refused(SHARED, f"run -n 2 --set cluster.shares={shares}", more, says=says)


CLASSES, FEATURES = 100_000, 1024
# Beyond what a process takes that has imported all. Data parallel keeps weights, gradients, two slots of Adam and more
# beside them: not even seven times the head were enough. Split over four, the most is at the start, before the head is
# cut: 3.9 times. Threads' stacks count too, and a machine of many processors has many.
ALLOWED_KIB = 5 * (CLASSES * FEATURES * 4 // 1024)


def base_kib():
    """What a process has before it does anything: the system counts imports too."""
    imports = "torch, torchvision, torch.distributed.elastic.agent.server.local_elastic_agent, manyhands.worker.entry"
    code = f"import {imports}; manyhands.worker.entry.import_training(); print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all private memory on Linux alone")
def test_a_head_of_100000_classes_trains_split_where_data_parallel_runs_out_of_memory(here):
    """Under a limit of memory that the system sets."""
    line = (
        f"ulimit -d {base_kib() + ALLOWED_KIB} && exec manyhands train synthetic:64x1x8x8x{CLASSES} {NETS}:wide -n 4 "
        "--batch 32 --set train.max_steps=2 --set train.evaluate_every=0 --set checkpoint.every=never "
        "--set checkpoint.pieces=true --set train.optimizer=adamw --set train.lr=0.001 --parallel"
    )
    finish(shell(f"{line} data --out whole"), code=1, says="out of memory")
    assert not list(here.glob("whole/checkpoints/step-*"))
    finish(shell(f"{line} auto --parallel.memory 768MiB --out split"), code=0)
    content = read("split/plan.json")
    assert content["mode"] == "auto"
    assert not {row["name"]: row["fits"] for row in content["candidates"]}["data parallel"]
    assert list(here.glob("split/checkpoints/step-00000002"))
