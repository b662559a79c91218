"""The user's mistakes: one screen, exit 2, and nothing left behind. All in this process, for speed."""

import shutil
from pathlib import Path

import pytest

from tests.data.sets import make
from tests.e2e.command import NETS, QUICK, alone, done, events, forked, inside, messages, refused


def everything():
    """All files and folders here but Python's own."""
    return {path for path in Path().rglob("*") if "__pycache__" not in path.parts}


def pictures(root, *classes, count=12):
    make(Path(root), classes, count, size=(10, 10))


def corrupt_picture():
    pictures("pets", "cats", "dogs")
    path = Path("pets/dogs/02.png")
    path.write_bytes(path.read_bytes()[:50])


def syntax_error():
    Path("wrong.py").write_text("import torch\n\ndef make(:\n    pass\n")


def data_that_fails():
    Path("mine.py").write_text("def raises():\n    raise ConnectionError('the database is down')\n")


def other_folder():
    Path("letters").mkdir()
    Path("letters/diary.txt").write_text("dear diary")


CASES = [
    (None, "digts", ['no data set is called "digts"', 'did you mean "digits"?']),
    (None, "digits --train.lrr 3", ['did you mean "train.lr"?']),
    (None, "digits --set train.batch=many", ["train.batch", "many"]),
    (None, "digits --recipe cifar10-fats --dry-run", ["there is no recipe cifar10-fats", '"cifar10-fast"?']),
    (corrupt_picture, "pets mlp", ["pets/dogs/02.png", "skip-corrupt"]),
    (None, "digits mlp --set model.num_classes=4", ["10 classes"]),
    (syntax_error, "digits wrong.py:make", ["wrong.py:3", "def make(:", "SyntaxError"]),
    (None, f"digits {NETS}:broken", ["nets.py:", "the weights are elsewhere"]),
    (data_that_fails, "mine.py:raises mlp", ["mine.py:2", "the database is down"]),
    (None, "digits --out /proc/nowhere", ["/proc/nowhere", "can't be created"]),
    (syntax_error, "digits --out wrong.py", ["wrong.py is a file"]),
    (other_folder, "digits --out letters", ["letters is not empty and contains no run"]),
    (None, "digits --resume old/run", ["old/run doesn't exist"]),
    (None, "digits resnt18 --out a/b/c", ['did you mean "resnet18"?']),
]


@pytest.mark.parametrize(("prepare", "line", "says"), CASES, ids=[line.split("/")[-1] for _, line, _ in CASES])
def test_a_mistake_gets_one_screen_and_leaves_everything_as_it_was(prepare, line, says):
    if prepare:
        prepare()
    before = everything()
    refused("train", line, by=alone, says=says)
    assert everything() == before


def test_an_existing_empty_folder_stays():
    Path("mine").mkdir()
    refused("train digits resnt18 --out mine", by=alone)
    assert Path("mine").is_dir()


def test_a_switch_by_its_path_needs_no_value():
    shown = done("train digits mlp --data.skip-corrupt -n 2 --train.lr 0.5 --show-config", by=inside).out
    assert all(line in shown for line in ("skip_corrupt = true", "processes = 2", "lr = 0.5"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with two checkpoints, of one epoch each."""
    folder = tmp_path_factory.mktemp("trained")
    words = "train digits mlp -q --epochs 2 --set checkpoint.every=1epoch --out run --world-size 1 --rank 0 --init"
    done(words, f"file://{folder}/meet", QUICK, cwd=folder)
    return folder / "run"


def copied(run, spoilt=()):
    """A copy of a run, some of whose checkpoints have a byte changed."""
    copy = Path(shutil.copytree(run, "copy"))
    checkpoints = sorted((copy / "checkpoints").glob("step-*"))
    for number in spoilt:
        path = checkpoints[number] / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return checkpoints


def test_a_checkpoint_of_another_network_or_a_torn_one_is_refused_where_it_is_named(trained):
    refused("train digits cnn --resume", trained, by=alone, says="the checkpoint belongs to another network")
    assert not Path("runs").exists()
    torn = copied(trained, [1])[1]
    refused("train digits mlp --resume", torn, by=alone, says="model.safetensors has the SHA-256")


@pytest.mark.parametrize("where", ["--out copy --resume auto", "--out new --resume copy"])
def test_a_torn_checkpoint_is_passed_over_with_a_warning(where, trained):
    first, torn = copied(trained, [1])
    ended = done("train digits mlp --epochs 3", where, by=alone)
    folder = where.split()[1]
    assert any(f"{torn.name} was skipped" in message for message in messages(folder, "warning"))
    assert f"WARNING {torn.name} was skipped" in ended.err
    assert events(folder, "resumed")[-1]["step"] == int(first.name.removeprefix("step-"))


def test_a_run_with_torn_checkpoints_alone_is_not_begun_anew(trained):
    checkpoints = copied(trained, [0, 1])
    refused("train digits mlp --out copy --epochs 3 --resume auto", by=alone, says="can be read")
    assert all(path.is_dir() for path in checkpoints)


TWICE = (
    "localhost and 127.0.0.1 are the same machine",
    'do:    list the machine once, with 2 processes: "localhost slots=2"',
)
DETACHED = "digits mlp --detach --hosts 127.0.0.1:2"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("launch digits mlp --hosts localhost,127.0.0.1 --out run", 3, TWICE),
        ("train digits mlp --mesh tp=4 -n 2 --dry-run", 2, "is for 4 processes, but the run has 2"),
        ("train digits mlp --mesh tp=1000000000 -n 2 --dry-run", 2, "is not a mesh"),
        ("train digits mlp --cluster.detach=true", 2, "only manyhands launch can detach a run"),
        (f"launch {DETACHED} --relay", 2, "a run with --relay can't be detached"),
        ("train digits mlp --batch 1 -n 2", 2, "set --batch 2 or higher"),
        ("train digits mlp more", 2, 'unexpected argument "more"'),
        ("launch train.py --on slurm", 2, "a script of your own can't be submitted to slurm"),
        ("train none.py", 2, "there is no script none.py"),
        ("train train.py --epochs 3", 2, "train.epochs has no effect on a script of your own"),
    ],
)
def test_impossible_requests_are_refused_before_anything_starts(line, code, says):
    Path("train.py").write_text("print('started')")
    refused(line, code=code, says=says, by=forked if "--detach" in line else inside)
    assert everything() == {Path("train.py")}


def test_what_trained_on_this_machine_alone_is_not_detached():
    done("train digits mlp --epochs 1 --out run", QUICK)
    refused("resume run --epochs 2 --detach", says="only manyhands launch", where=False)


@pytest.mark.slow
def test_names_with_shell_commands_stay_names():
    trick = "$(touch executed)"
    pictures(trick, trick, "`touch executed`", "; touch executed;", count=8)
    job = [trick, "mlp", "--epochs", 1, "--batch", 4]
    done("train", job, ["--out", f"run {trick}"], "-n 2 --set train.channels_last=false")
    assert trick in Path(f"run {trick}/report.html").read_text(encoding="utf-8")
    done("launch", job[:4], [f"--hosts=-oProxyCommand={trick}"], code=2)
    assert not list(Path().rglob("executed"))
