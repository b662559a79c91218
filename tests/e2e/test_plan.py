"""manyhands plan: searched, written, shown, proven and timed; nothing of the user's is overwritten."""

import json
import re

import pytest

from manyhands.cli.main import main
from tests.e2e import nets
from tests.e2e.command import QUICK, Ended, assert_one_screen, finish, forked, run

JOB = ("synthetic:64x3x16x16x10", "cnn", "--batch", "32", "-n", "2")


@pytest.fixture
def plan(capsys):
    """Runs `manyhands plan …` within this process, since each of its own would import torch anew."""

    def typed(*words):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *map(str, words)])
        said = capsys.readouterr()
        return Ended(ended.value.code, said.out, said.err)

    return typed


def test_offline_a_table_a_plan_and_a_picture(plan, here):
    ended = plan(*JOB, "--no-measure")
    assert ended.code == 0, ended.err
    assert "data parallel" in ended.out
    assert "is kept" in ended.out or "is chosen" in ended.out
    content = json.loads((here / "plan.json").read_text())
    assert content["format"] == "plan/1"
    assert content["mesh"] == {"dp": 2}
    assert content["reason"] in " ".join(ended.out.split())
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")
    shown = plan("plan.json")
    assert shown.code == 0, shown.err
    assert content["reason"] in shown.out
    assert "gradients" in shown.out


def test_the_answer_is_the_first_line_and_the_table_fits_100_columns(plan, here):
    ended = plan("synthetic:64x1x8x8x10", "cnn", "-n", "4", "--link", "10mbit", "--no-measure")
    answer, *table = ended.out.splitlines()
    assert answer.startswith("use one machine: ")
    assert answer.split("\n")[0] == json.loads((here / "plan.json").read_text())["reason"].splitlines()[0]
    assert max(map(len, table)) <= 100
    assert sum("→" in line for line in table) == 1


def test_pins_and_meshes_are_kept_and_shown(plan, here):
    ended = plan(*JOB[:-1], 4, "--mesh", "dp=2,tp=2", "--pin", "13=n@dp o@tp", "--no-measure", "--json")
    assert ended.code == 0, ended.err
    content = json.loads(ended.out)
    assert content["ops"]["13"] == "n@dp o@tp"
    assert content["pinned"] == ["13"]
    rows = {row["name"]: row for row in json.loads(plan("plan.json", "--json").out)["rows"]}
    assert rows["13"]["strategy"] == "n@dp o@tp"
    assert rows["13"]["piece"] == "[16, 5]"


def test_a_slow_link_shows_what_agreeing_costs(plan, here):
    job = ("synthetic:6400x3x16x16x10", "cnn", "--batch", "32", "-n", "3", "--set", "train.epochs=40")
    ended = plan(*job, "--link", "1mbit", "--no-measure", "--json")
    assert ended.code == 0, ended.err
    sync = json.loads((here / "plan.json").read_text())["sync"]
    assert json.loads(ended.out)["sync"] == sync
    assert (sync["machines"], sync["steps"]) == (3, 40 * 200)
    assert {row["method"] for row in sync["methods"]} == {"allreduce", "bf16", "powersgd", "local"}
    (chosen,) = (row for row in sync["methods"] if row["chosen"])
    assert chosen["method"] == "local"
    assert f"--sync auto would choose another method: {sync['reason']}" in " ".join(ended.err.split())
    asked = plan(*job, "--link", "1mbit", "--no-measure", "--sync", "auto", "--out", "asked.json")
    assert asked.code == 0, asked.err
    (arrow,) = (line for line in asked.out.splitlines() if "→" in line)
    assert "local" in arrow
    shown = plan("plan.json")
    assert shown.code == 0, shown.err
    assert "use one machine" in shown.out
    fast = plan(*job, "--no-measure", "--out", "fast.json", "--set", "sync.link=100gbit")
    assert fast.code == 0, fast.err
    methods = json.loads((here / "fast.json").read_text())["sync"]["methods"]
    assert [row["method"] for row in methods if row["chosen"]] == ["allreduce"]


def test_machines_that_only_ssh_reaches_have_a_slower_link(plan, here):
    job = ("synthetic:6400x3x16x16x10", "cnn", "--batch", "32", "-n", "3", "--link", "1gbit", "--no-measure", "--json")
    direct = plan(*job)
    assert direct.code == 0, direct.err
    tunnel = plan(*job, "--set", "cluster.interface=ssh", "--out", "tunnel.json")
    assert tunnel.code == 0, tunnel.err
    (fast,), (slow,) = (
        [row["step_ms"] for row in json.loads(ended.out)["candidates"] if row["name"] == "data parallel"]
        for ended in (direct, tunnel)
    )
    assert slow > fast


def test_with_a_link_the_share_of_a_step_is_timed_here(plan, here):
    ended = plan(*JOB, "--link", "10mbit", "--set", "train.max_steps=7")
    assert ended.code == 0, ended.err
    sync = json.loads((here / "plan.json").read_text())["sync"]
    assert sync["steps"] == 7
    assert 0 < sync["compute_s"] < 60
    assert "allreduce" in sync["reason"]


def test_one_table_prices_an_update_once_and_recommends_one_row(plan, here):
    ended = plan(*JOB, "--link", "10mbit", "--no-measure", "--json")
    assert ended.code == 0, ended.err
    (arrow,) = (line for line in ended.err.splitlines() if "→" in line)
    content = json.loads(ended.out)
    (exact,) = (row for row in content["sync"]["methods"] if row["method"] == "allreduce")
    own = [line for line in ended.err.splitlines() if "dp=2" in line and "ssh" not in line]
    (row,) = (line for line in own if "data parallel" in line and "," not in line)
    assert float(row.replace("→", " ").split()[3]) == pytest.approx(exact["step_s"] * 1e3, rel=0.01)
    assert content["recommended"]["plan"] in arrow


def test_where_a_plan_sends_nothing_one_machine_does(plan, here):
    ended = plan("synthetic:64x1x8x8x10", "cnn", "-n", "4", "--link", "10mbit", "--no-measure", "--json")
    assert ended.code == 0, ended.err
    content = json.loads(ended.out)
    assert content["reason"].startswith("use one machine")
    assert content["recommended"] == {"plan": "one process", "processes": 1}


def test_devices_that_are_not_here_are_estimated_and_it_is_said(plan, here):
    ended = plan(*JOB, "--device-model", "a100")
    assert ended.code == 0, ended.err
    assert "estimated for NVIDIA A100" in ended.err
    for words, said in (
        (("--device-model", "abacus"), "h100"),
        (("--device-model", "t4", "--set", "train.precision=bf16"), "fp16"),
    ):
        ended = plan(*JOB, *words, "--out", "other.json")
        assert ended.code == 2
        assert_one_screen(ended.err)
        assert said in ended.err


@pytest.mark.parametrize("device", ["gpu", "h100", "cuda:99"])
@pytest.mark.parametrize("count", ["2", "1..4"])
def test_a_device_that_is_not_here_is_refused_with_the_option_that_estimates_it(plan, here, device, count):
    ended = plan(*JOB[:-1], count, "--link", "1gbit", "--device", device)
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert f"this machine has no {device.partition(':')[0]} device" in ended.err
    if device != "cuda:99":
        assert "--device-model h100" in ended.err


def test_a_pin_that_does_not_fit_is_answered_with_the_op_that_it_names(plan, here):
    ended = plan("digits", f"{nets.__file__}:OneNumber", "-n", "2", "--no-measure", "--pin", "matmul=h@dp")
    assert ended.code == 2
    assert "matmul (matmul) can't be split as h@dp: the op has no dimension h" in ended.err
    assert "split the op by n, r, i, o" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--parallel", "semi", "--pin", "matmul=((1,1),(1,2))"]])
def test_one_number_for_each_sample_is_said_as_it_is(here, split):
    ended = finish(forked("train", "digits", f"{nets.__file__}:OneNumber", "-n", "2", *split, *QUICK))
    assert ended.code == 2
    assert re.search(r"the network's forward returns a tensor \[\d+\]\n", ended.err)
    assert "[N, classes]" in ended.err


def test_other_mistakes_are_told_before_the_file_that_is_there(plan, here):
    assert plan(*JOB, "--no-measure").code == 0
    for words, said in ((("--sync", "fast"), "sync"), (("--link", "fast"), "speed"), (("--memory", "much"), "amount")):
        ended = plan(*JOB, "--no-measure", *words)
        assert ended.code == 2
        assert said in ended.err
        assert "already exists" not in ended.err
    assert "already exists" in plan(*JOB, "--no-measure").err


def test_what_is_there_is_not_overwritten(plan, here):
    (here / "plan.png").write_text("mine")
    ended = plan(*JOB, "--no-measure")
    assert ended.code == 2
    assert_one_screen(ended.err)
    (here / "plan.json").write_text('{"mine": 1}')
    ended = plan(*JOB, "--no-measure", "--force")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert (here / "plan.json").read_text() == '{"mine": 1}'
    assert (here / "plan.png").read_text() == "mine"
    other = plan(*JOB, "--no-measure", "--out", "other.json")
    assert other.code == 0, other.err
    again = plan(*JOB, "--no-measure", "--out", "other.json", "--force")
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    "words",
    [
        (*JOB, "--mesh", "dp=3"),
        (*JOB, "--mesh", "dp"),
        (*JOB, "--pin", "nothing=n@dp"),
        (*JOB, "--pin", "n@dp"),
        (*JOB, "--memory", "much"),
        (*JOB, "--memory", "1kB"),
        (*JOB, "--link", "fast"),
        (*JOB, "--set", "sync.link=fast"),
        (*JOB, "--out", "plan.txt"),
        (*JOB, "--measure"),
        (*JOB, "-n", "1"),
        (*JOB[:2], "--batch", "2", "-n", "4"),
        ("no-such-plan.json",),
        ("digits", "mlp", "third"),
    ],
)
def test_a_mistake_is_one_screen(plan, here, words):
    ended = plan(*words, "--no-measure") if words[0].startswith("synth") else plan(*words)
    assert ended.code == 2
    assert_one_screen(ended.err, where=False)
    assert not (here / "plan.json").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "plan/1"}', '{"format": "plan/1", "mesh": {"dp": 2}}',
                '{"format": "plan/1", "mesh": {"dp": 2}, "network": {"channels": "x"}, "graph": {"samples": 3}}',
                '{"format": "plan/1", "mesh": {"dp": 2}, "network": 3, "graph": 4}'],
)  # fmt: skip
def test_what_is_no_plan_or_says_nothing_of_its_network_is_refused(plan, here, content):
    (here / "mine.json").write_text(content)
    ended = plan("mine.json")
    assert ended.code == 2
    assert_one_screen(ended.err)


# Each starts processes that import torch, up to three times.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_measured_then_proven(here):
    ended = run("plan", *JOB, "--verify")
    assert ended.code == 0, ended.err
    assert "measured" in ended.out
    assert "computes the same" in ended.err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_plan_by_hand_is_proven_and_timed(plan, here):
    assert plan(*JOB, "--no-measure").code == 0
    content = json.loads((here / "plan.json").read_text())
    (here / "plan.json").write_text(json.dumps({**content, "ops": {"loss": "r@dp", "4": "o@dp"}}))
    ended = run("plan", "plan.json", "--verify", "--measure")
    assert ended.code == 0, ended.err
    assert "computes the same" in ended.err
    assert "data parallel" in ended.out
    assert "ms per update" in ended.out
