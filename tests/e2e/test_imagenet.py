"""imagenet main.py's command lines, on one node and on several, and the files that it leaves in the current folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from manyhands.checkpoint.foreign import read_foreign
from tests.e2e.command import assert_one_screen, environment, events, finish, free_port, run, start

pytestmark = pytest.mark.timeout(600)
JOB = ["imagenet", "images", "-a", "shufflenet_v2_x0_5", "-j", "1", "--lr", "0.02", "--set", "run.report=false"]
CLASSES, TRAIN, VAL = 3, 8, 4


@pytest.fixture
def images(here):
    """A folder in ImageNet's layout, of pictures that differ in colour; not square, as photographs are."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            folder = here / "images" / split / f"n0{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                picture = torch.randint(0, 120, (48, 64, 3), generator=generator, dtype=torch.uint8)
                picture[:, :, label] += 120
                Image.fromarray(picture.numpy()).save(folder / f"{number}.png")
    return here / "images"


def written(path):
    return torch.load(path, weights_only=True)


def evaluations(folder):
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "evaluation"]


def acc(ended):
    """What the line that main.py prints says."""
    (line,) = (line for line in ended.out.splitlines() if line.startswith(" *"))
    star, first, top1, fifth, top5 = line.split()
    assert (star, first, fifth) == ("*", "Acc@1", "Acc@5")
    return float(top1), float(top5)


@pytest.mark.slow
def test_one_node_writes_goes_on_and_evaluates(images, here):
    (here / "checkpoint.pth.tar").write_text("the user's own")
    ended = run(*JOB, "-b", "8", "--epochs", "2", "-p", "2", "--out", "run")
    assert ended.code == 0, ended.err
    assert ended.err.count(" step=1/3 ") == ended.err.count(" step=3/3 ") == 2
    assert " step=2/3 " not in ended.err
    assert "checkpoint.pth.tar existed before this run and was renamed to checkpoint-1.pth.tar" in ended.err
    assert (here / "checkpoint-1.pth.tar").read_text() == "the user's own"

    content, best = written("checkpoint.pth.tar"), written("model_best.pth.tar")
    scores = evaluations("run")
    assert (content["epoch"], content["arch"]) == (2, "shufflenet_v2_x0_5")
    assert (content["scheduler"]["last_epoch"], content["scheduler"]["base_lrs"]) == (2, [0.02])
    assert content["best_acc1"].item() == pytest.approx(100 * max(score["top1"] for score in scores))
    assert best["epoch"] == next(score["epoch"] for score in scores if score["top1"] == max(s["top1"] for s in scores))
    assert content["state_dict"]["fc.weight"].shape == (1000, 1024)

    # Nothing was asked to be kept this time: the file is the one that the run goes on from.
    ended = run(*JOB, "-b", "8", "--epochs", "3", "--resume", "checkpoint.pth.tar", "--json", "-q")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out.splitlines()[-1])
    assert told["epochs"] == 3
    assert written("checkpoint.pth.tar")["epoch"] == 3
    assert not (here / "checkpoint-2.pth.tar").exists()

    ended = run(*JOB, "-e", "--resume", "checkpoint.pth.tar")
    assert ended.code == 0, ended.err
    assert acc(ended) == pytest.approx((100 * told["final_top1"], 100 * told["final_top5"]), abs=6e-4)

    ended = run(*JOB[:6], "--lr", "0.1", "-b", "8", "--epochs", "4", "--resume", "checkpoint.pth.tar")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert "was trained with --lr 0.02, not 0.1" in ended.err


def on_nodes(here, count, *words, **others):
    """The same command on so many nodes, each in a folder of its own; node 0's first."""
    words = [*words, "--dist-url", f"tcp://127.0.0.1:{free_port()}", "--dist-backend", "gloo"]
    words += ["--multiprocessing-distributed", "--world-size", count]
    started = []
    for rank in range(count):
        folder = here / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        started.append(start(*words, "--rank", rank, cwd=folder, **others))
    ended = [finish(process) for process in started]
    assert [each.code for each in ended] == [0] * count, "\n".join(each.err for each in ended)
    return ended


# Two accelerators on each node, as far as the command knows; the processes find none and take the CPU.
TWO_EACH = "import manyhands.cluster.doctor.accelerators as a, sys; a.count_accelerators = lambda: 2; \
from manyhands.cli.main import main; main(sys.argv[1:])"


@pytest.mark.slow
def test_two_nodes_start_two_processes_each(here):
    words = [
        "imagenet",
        "--dummy",
        "-a",
        "shufflenet_v2_x0_5",
        "--epochs",
        "1",
        "-b",
        "4",
        "--data.train-samples",
        "16",
    ]
    on_nodes(here, 2, *words, "--data.test-samples", "8", "--data.image-size", "32", program=("-c", TWO_EACH))
    (started,) = events(next((here / "node-0" / "runs").iterdir()), "started")
    assert started["data"]["processes"] == 4


# At a usual rate so few pictures make rounding grow a thousandfold in each update, in double precision too.
EXACT = [*JOB[:6], "--lr", "0.0005", "--train.precision", "fp64", "--set", "run.report=false"]


@pytest.fixture
def nodes(images, here):
    """A folder for each of two nodes, with the same data in both."""
    for rank in (0, 1):
        (here / f"node-{rank}").mkdir()
        (here / f"node-{rank}" / "images").symlink_to(images)


def assert_same_training(here):
    """Both nodes together came to where one node did."""
    two, one = read_foreign(here / "node-0" / "checkpoint.pth.tar"), read_foreign(here / "checkpoint.pth.tar")
    assert two.state["epoch"] == one.state["epoch"]
    assert two.state["scheduler"] == one.state["scheduler"]
    for name, tensor in one.model.items():
        torch.testing.assert_close(two.model[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_nodes_make_one_node_of_twice_the_batch(nodes, here):
    on_nodes(here, 2, *EXACT, "-b", "4", "--epochs", "2", "--out", "run")
    ended = run(*EXACT, "-b", "8", "--epochs", "2", "--out", "run")
    assert ended.code == 0, ended.err
    files = {path.name for path in (here / "node-0").iterdir()}
    assert files == {"images", "run", "checkpoint.pth.tar", "model_best.pth.tar"}
    assert not list((here / "node-1").glob("*.pth.tar"))
    several, alone = evaluations("node-0/run"), evaluations("run")
    assert [score["count"] for score in several] == [CLASSES * VAL] * 2
    assert [s["loss"] for s in several] == pytest.approx([s["loss"] for s in alone], rel=1e-6)
    assert_same_training(here)


@pytest.mark.slow
def test_a_node_without_the_file_is_given_the_first_ones(nodes, here):
    ended = run(*EXACT, "-b", "8", "--epochs", "1", "--out", "run")
    assert ended.code == 0, ended.err
    shutil.copyfile("checkpoint.pth.tar", here / "node-0" / "checkpoint.pth.tar")
    on_nodes(here, 2, *EXACT, "-b", "4", "--epochs", "2", "--resume", "checkpoint.pth.tar", "--out", "run")
    ended = run(*EXACT, "-b", "8", "--epochs", "2", "--resume", "checkpoint.pth.tar", "--out", "more")
    assert ended.code == 0, ended.err
    assert_same_training(here)
    assert not list((here / "node-1").glob("*.pth.tar"))


@pytest.mark.slow
def test_two_nodes_evaluate_as_one(nodes, here):
    assert run(*JOB, "-b", "8", "--epochs", "1", "--out", "run").code == 0
    shutil.copyfile("checkpoint.pth.tar", here / "node-0" / "checkpoint.pth.tar")
    both = on_nodes(here, 2, *JOB, "-e", "--resume", "checkpoint.pth.tar")
    assert acc(both[0]) == acc(run(*JOB, "-e", "--resume", "checkpoint.pth.tar"))
    assert not both[1].out


@pytest.mark.slow
def test_made_pictures_and_a_later_epoch(here):
    job = ["imagenet", "--dummy", "-a", "shufflenet_v2_x0_5", "-b", "4", "--epochs", "31", "--start-epoch", "30"]
    few = ["--data.train-samples", "8", "--data.test-samples", "4", "--set", "run.report=false"]
    ended = run(*job, *few, "--json", "-q", "--out", "run")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["epochs"] == 31
    steps = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in steps if line["kind"] == "step"]
    assert rates == pytest.approx([0.01] * len(rates))
    assert written("checkpoint.pth.tar")["scheduler"]["last_epoch"] == 31


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "no folder nowhere/train and no folder nowhere/val"),
        (["images", "--resume", "missing.pth.tar"], "no checkpoint at missing.pth.tar"),
        (["images", "-a", "resnet19"], 'did you mean "torchvision:resnet18"?'),
        pytest.param(["images", "--gpu", "99", "-b", "2"], "no accelerator", marks=pytest.mark.slow),
        pytest.param(["images", "--world-size", "3", "--rank", "0"], "--dist-url tcp://", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_one_screen_and_leave_nothing(words, says, images, here):
    ended = run("imagenet", *words)
    assert ended.code == 2, ended.err
    assert_one_screen(ended.err)
    assert says in ended.err
    assert {path.name for path in here.iterdir()} == {"images"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="would have named a GPU that isn't there")
@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_told_in_main_pys_flags(images, here):
    ended = run(*JOB, "--epochs", "30", "--gpu", "0")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert "where: --gpu" in ended.err
    assert "--no-accel" in ended.err
    assert "--device" not in ended.err


@pytest.mark.slow
def test_three_nodes_on_imagenets_own_pictures(here):
    """Document 004's command line, on as many nodes."""
    base = Path(environment().get("MANYHANDS_TEST_DATA", "") or Path(__file__).parents[3] / "shared" / "data")
    sample = base / "imagenet-sample"
    if not sample.is_dir():
        pytest.skip(f"would have read {sample} (MANYHANDS_TEST_DATA names another folder)")
    for split in ("train", "val"):
        for folder in sorted(path for path in sample.iterdir() if path.is_dir())[:12]:
            (here / "images" / split).mkdir(parents=True, exist_ok=True)
            (here / "images" / split / folder.name).symlink_to(folder)
    job = ["imagenet", os.path.relpath(here / "images", here / "node-0"), "-a", "resnet18", "-j", "2", "--epochs", "1"]
    first, *others = on_nodes(here, 3, *job, "-b", "2", "--set", "run.report=false")
    assert "evaluated=12 " in first.err
    assert not any(each.out for each in others)
    assert read_foreign(here / "node-0" / "checkpoint.pth.tar").state["epoch"] == 1
