"""imagenet main.py's command lines, on one node and on several, and the files that it leaves in the current folder."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from manyhands.checkpoint.foreign import read_foreign
from tests.data.sets import make
from tests.e2e.command import begin, done, finish, free_port, metrics, read, refused, wait_until

pytestmark = pytest.mark.timeout(600)
NET = "-a shufflenet_v2_x0_5 -j 1 --set run.report=false"
SMALL = f"imagenet images {NET} --data.image-size 64"
JOB = f"{SMALL} --lr 0.02"
# At a usual rate so few pictures make rounding grow a thousandfold in each update, in double precision too.
EXACT = f"{SMALL} --lr 0.0005 --train.precision fp64"
RESUMED = "--resume checkpoint.pth.tar"
CLASSES, TRAIN, VAL = 3, 8, 4


@pytest.fixture
def images(here):
    """A folder in ImageNet's layout; the pictures are not square, as photographs are."""
    for split, count in (("train", TRAIN), ("val", VAL)):
        make(here / "images" / split, [f"n0{label}" for label in range(CLASSES)], count, size=(64, 48))
    return here / "images"


def written(path):
    return torch.load(path, weights_only=True)


def acc(ended):
    """What the line that main.py prints says."""
    (line,) = (line for line in ended.out.splitlines() if line.startswith(" *"))
    star, first, top1, fifth, top5 = line.split()
    assert (star, first, fifth) == ("*", "Acc@1", "Acc@5")
    return float(top1), float(top5)


@pytest.mark.slow
def test_one_node_writes_resumes_and_evaluates(images, here):
    (here / "checkpoint.pth.tar").write_text("the user's own")
    ended = done(JOB, "-b 8 --epochs 2 -p 2 --out run")
    assert ended.err.count(" step=1/3 ") == ended.err.count(" step=3/3 ") == 2
    assert " step=2/3 " not in ended.err
    assert "checkpoint.pth.tar existed before this run and was renamed to checkpoint-1.pth.tar" in ended.err
    assert (here / "checkpoint-1.pth.tar").read_text() == "the user's own"

    content, best = written("checkpoint.pth.tar"), written("model_best.pth.tar")
    scores = {score["epoch"]: score["top1"] for score in metrics("run", "evaluation")}
    assert (content["epoch"], content["arch"]) == (2, "shufflenet_v2_x0_5")
    assert (content["scheduler"]["last_epoch"], content["scheduler"]["base_lrs"]) == (2, [0.02])
    assert content["best_acc1"].item() == pytest.approx(100 * max(scores.values()))
    assert best["epoch"] == max(scores, key=scores.get)
    assert content["state_dict"]["fc.weight"].shape == (1000, 1024)

    # Nothing was asked to be kept this time: the file is the one that the run goes on from.
    reported = json.loads(done(JOB, "-b 8 --epochs 3 --json -q", RESUMED).out.splitlines()[-1])
    assert reported["epochs"] == 3
    assert written("checkpoint.pth.tar")["epoch"] == 3
    assert not (here / "checkpoint-2.pth.tar").exists()
    shown = acc(done(JOB, "-e", RESUMED))
    assert shown == pytest.approx((100 * reported["final_top1"], 100 * reported["final_top5"]), abs=6e-4)
    refused(EXACT, "-b 8 --epochs 4", RESUMED, says="was trained with --lr 0.02, not 0.0005")


def on_nodes(here, *given):
    """The same command on two nodes, each in a folder of its own; node 0's first."""
    place = f"--dist-url tcp://127.0.0.1:{free_port()} --dist-backend gloo --multiprocessing-distributed --world-size 2"
    started = [begin(*given, place, "--rank", rank, cwd=here / f"node-{rank}") for rank in (0, 1)]
    ended = [finish(process) for process in started]
    assert [each.code for each in ended] == [0, 0], "\n".join(each.err for each in ended)
    return ended


MADE = f"imagenet --dummy {NET} -b 4"


@pytest.mark.slow
def test_two_nodes_of_two_processes_survive_a_briefly_stopped_process(here, monkeypatch):
    """No launcher could restart it; one that could would have ended it after 15 s."""
    # As far as the command knows; the processes find no accelerators and take the CPU.
    monkeypatch.setattr("manyhands.cluster.doctor.accelerators.count_accelerators", lambda: 2)
    job = f"{MADE} --epochs 10000 --data.train-samples 16 --data.test-samples 8 --data.image-size 32 --out run"
    run, place = here / "node-0" / "run", f"--dist-url file://{here}/meet --multiprocessing-distributed --world-size 2"
    for rank in (0, 1):
        (here / f"node-{rank}").mkdir()
    nodes = [begin(job, place, "--rank", rank, cwd=here / f"node-{rank}") for rank in (0, 1)]
    wait_until(lambda: metrics(run), nodes[0])
    time.sleep(4)  # a process that has not been seen to train is not ended
    (ranks, trained) = read(run, "env.json")["ranks"], len(metrics(run))
    assert len(ranks) == 4
    os.kill(ranks[1]["pid"], signal.SIGSTOP)
    time.sleep(22)
    os.kill(ranks[1]["pid"], signal.SIGCONT)
    wait_until(lambda: len(metrics(run)) > trained + 10, nodes[0])
    for node in nodes:
        node.terminate()
    assert [finish(node).code for node in nodes] == [75, 75]
    assert not (here / "meet").exists()


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
    assert not list((here / "node-1").glob("*.pth.tar"))


@pytest.mark.slow
def test_two_nodes_train_resume_and_evaluate_as_one_node_of_twice_the_batch(nodes, here):
    on_nodes(here, EXACT, "-b 4 --epochs 1 --out run")
    done(EXACT, "-b 8 --epochs 1 --out run")
    files = {path.name for path in (here / "node-0").iterdir()}
    assert files == {"images", "run", "checkpoint.pth.tar", "model_best.pth.tar"}
    ((several,), (alone,)) = metrics("node-0/run", "evaluation"), metrics("run", "evaluation")
    assert several["count"] == CLASSES * VAL
    assert several["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert_same_training(here)
    # Node 1 has no file, and is given the first one's.
    shutil.copyfile("checkpoint.pth.tar", here / "node-0" / "checkpoint.pth.tar")
    both = on_nodes(here, EXACT, "-e", RESUMED)
    assert acc(both[0]) == pytest.approx((100 * alone["top1"], 100 * alone["top5"]), abs=6e-4)
    assert not both[1].out
    on_nodes(here, EXACT, "-b 4 --epochs 2 --out more", RESUMED)
    done(EXACT, "-b 8 --epochs 2 --out more", RESUMED)
    assert_same_training(here)


@pytest.mark.slow
def test_made_pictures_and_a_later_epoch():
    few = "--epochs 31 --start-epoch 30 --data.train-samples 8 --data.test-samples 4 --json -q --out run"
    assert json.loads(done(MADE, few).out)["epochs"] == 31
    rates = [line["learning_rate"] for line in metrics("run")]
    assert rates == pytest.approx([0.01] * len(rates))
    assert written("checkpoint.pth.tar")["scheduler"]["last_epoch"] == 31


NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="would have named a GPU that isn't there")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nowhere", "no folder nowhere/train and no folder nowhere/val"),
        ("images --resume missing.pth.tar", "no checkpoint at missing.pth.tar"),
        pytest.param("images --gpu 99 -b 2", "no accelerator", marks=pytest.mark.slow),
        ("images --world-size 3 --rank 0 --dist-url tcp://192.0.2.77:8090", ("not an address of", "where: --dist-url")),
        pytest.param("images --gpu 0", ("where: --gpu", "--no-accel"), marks=[NO_GPU, pytest.mark.slow]),
    ],
)
def test_mistakes_are_one_screen_in_main_pys_flags_and_leave_nothing(line, says, images, here):
    assert "--device" not in refused("imagenet", line, says=says)
    assert {path.name for path in here.iterdir()} == {"images"}
