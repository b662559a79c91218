"""The user's mistakes: one screen, exit 2, and nothing left behind. All in this process, for speed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.data.sets import make
from tests.e2e.command import NETS, QUICK, alone, done, events, forked, inside, messages, refused, shell


def everything():
    """All files and folders here but Python's own."""
    return {path for path in Path().rglob("*") if "__pycache__" not in path.parts}


def corrupt_picture():
    path = make(Path("pets"), ("cats", "dogs"), 12, size=(10, 10)) / "dogs/02.png"
    path.write_bytes(path.read_bytes()[:50])


def file(name, text):
    def write():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)

    return write


WRONG = file("wrong.py", "import torch\n\ndef make(:\n    pass\n")
FAILS = file("mine.py", "def raises():\n    raise ConnectionError('the database is down')\n")
SCRIPT = file("train.py", "print('started')")
FLAT = "class Flat(nn.Linear):\n    def forward(self, images):\n        return super().forward(images.flatten(1))\n"
NET = file("net.py", f"from torch import nn\n{FLAT}few, rgb = Flat(63, 10), nn.Sequential(nn.Conv2d(3, 10, 8))\n")
DIGITS = "train digits mlp"
CASES = [
    (None, alone, "train digts", ['no data set is called "digts"', 'did you mean "digits"?']),
    (None, alone, "train digits --train.lrr 3", 'did you mean "train.lr"?'),
    (None, alone, "train digits --set train.batch=many", ["train.batch", "many"]),
    (None, alone, "train digits --recipe cifar10-fats --dry-run", "there is no recipe cifar10-fats"),
    (corrupt_picture, alone, "train pets mlp", ["pets/dogs/02.png", "skip-corrupt"]),
    (None, alone, f"{DIGITS} --set model.num_classes=4", "10 classes"),
    (WRONG, alone, "train digits wrong.py:make", ["wrong.py:3", "def make(:", "SyntaxError"]),
    (None, alone, f"train digits {NETS}:broken", ["nets.py:", "the weights are elsewhere"]),
    (NET, inside, "train digits net.py:few", ["trial step before training failed on 2 samples of", "net.py:4"]),
    (NET, inside, "train digits net.py:rgb", ["of shape 1x8x8: RuntimeError: Given", "where: model.name = net.py:rgb"]),
    (FAILS, alone, "train mine.py:raises mlp", ["mine.py:2", "failed: ConnectionError: the database is down"]),
    (FAILS, alone, "train digits mine.py", ['no network is called "mine.py"', "function of the file: mine.py:raises"]),
    (None, alone, "train digits --out /proc/nowhere", ["/proc/nowhere", "can't be created"]),
    (WRONG, alone, "train digits --out wrong.py", "wrong.py is a file"),
    (file("letters/diary.txt", ""), alone, "train digits --out letters", "letters is not empty and contains no run"),
    (None, alone, "train digits --resume old/run", "old/run doesn't exist"),
    (None, alone, "train digits resnt18 --out a/b/c", 'did you mean "resnet18"?'),
    (None, inside, "launch digits mlp --hosts localhost,127.0.0.1", "list the machine once, with 2 processes"),
    (None, inside, f"{DIGITS} --mesh tp=1000000000 -n 2 --dry-run", "is not a mesh"),
    (None, inside, f"{DIGITS} --cluster.detach=true", "only manyhands launch can detach a run"),
    (None, forked, "launch digits mlp --detach --hosts 127.0.0.1:2 --relay", "a run with --relay can't be detached"),
    (None, inside, f"{DIGITS} --batch 1 -n 2", "set --batch 2 or higher"),
    (None, inside, f"{DIGITS} more", 'unexpected argument "more"'),
    (SCRIPT, inside, "launch train.py --on slurm", "a script of your own can't be submitted to slurm"),
    (None, inside, "train none.py", "there is no script none.py"),
    (SCRIPT, inside, "train train.py --epochs 3", "train.epochs has no effect on a script of your own"),
]


@pytest.mark.parametrize(("prepare", "by", "line", "says"), CASES, ids=[line.split("/")[-1] for *_, line, _ in CASES])
def test_a_mistake_gets_one_screen_and_leaves_everything_as_it_was(prepare, by, line, says):
    if prepare:
        prepare()
    before = everything()
    refused(line, by=by, says=says, code=3 if "localhost," in line else 2)
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


def read_only(*arguments):
    """Starts a command that can't write to the folder `copy`."""
    mount = "mount --bind copy copy && mount -o remount,bind,ro copy"
    return shell(f"unshare -rm sh -c '{mount} && manyhands {' '.join(arguments)}'")


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0, reason="no namespaces here"
)
def test_a_run_on_a_read_only_disk_is_explained_and_its_writers_name_another_place(trained):
    copied(trained)
    assert done("why copy", by=read_only).out.startswith("copy finished")
    unwritable = "can't be written: Read-only file system\n  where: "
    for line in ("report copy", "resume copy"):
        refused(line, by=read_only, says=(f"run folder copy {unwritable}copy\n", "cp -r copy DIR"))
    for line, file in (("plan digits mlp", "b.json"), ("plan digits mlp -n 1..2 --link 1gbit", "b.svg")):
        refused(line, f"--out copy/b/{file}", by=read_only, says=(f"copy/b/{file} {unwritable}", f"--out DIR/{file}"))


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
    assert bool(events(folder, "undone")) == (folder == "copy")


def test_a_run_with_torn_checkpoints_alone_is_not_begun_anew(trained):
    checkpoints = copied(trained, [0, 1])
    refused("train digits mlp --out copy --epochs 3 --resume auto", by=alone, says="can be read")
    assert all(path.is_dir() for path in checkpoints)
    refused("resume copy --epochs 2 --detach", says="only manyhands launch", where=False)


@pytest.mark.slow
def test_names_with_shell_commands_stay_names():
    trick = "$(touch executed)"
    make(Path(trick), (trick, "`touch executed`", "; touch executed;"), 8, size=(10, 10))
    job = [trick, "mlp", "--epochs", 1, "--batch", 4]
    done("train", job, ["--out", f"run {trick}"], "-n 2 --set train.channels_last=false")
    assert trick in Path(f"run {trick}/report.html").read_text(encoding="utf-8")
    done("launch", job[:4], [f"--hosts=-oProxyCommand={trick}"], code=2)
    assert not list(Path().rglob("executed"))
