"""The user's mistakes: one screen, exit 2, and nothing left behind. All in this process, for speed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from manyhands.cli.main import main
from tests.data.sets import write_idx
from tests.e2e.command import NETS, QUICK, assert_one_screen, events, run


def call(capsys, *arguments):
    """The command in this process, as the only one of a group; its exit code and standard error."""
    alone = ["--init", f"file://{Path.cwd()}/meet", "--world-size", "1", "--rank", "0"]
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), *QUICK, *alone])
    return ended.value.code, capsys.readouterr().err


def everything():
    """All files and folders here but Python's own."""
    return {path for path in Path().rglob("*") if "__pycache__" not in path.parts}


def pictures(folder, count, text="png"):
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(count)
    for number in range(count):
        pixels = numbers.integers(0, 255, (10, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{text}")


def idx_files(folder, labels=None):
    folder.mkdir(parents=True)
    for word, count in (("train", 40), ("t10k", 20)):
        pixels = torch.arange(count * 784).remainder(255).to(torch.uint8).view(count, 28, 28)
        write_idx(folder / f"{word}-images-idx3-ubyte", pixels)
        numbers = torch.arange(count).remainder(10).to(torch.uint8) if labels is None else labels[:count]
        write_idx(folder / f"{word}-labels-idx1-ubyte", numbers)


def empty_class():
    pictures(Path("pets/cats"), 4)
    Path("pets/dogs").mkdir()


def one_class():
    pictures(Path("pets/cats"), 4)


def corrupt_picture():
    pictures(Path("pets/cats"), 12)
    pictures(Path("pets/dogs"), 12)
    path = Path("pets/dogs/2.png")
    path.write_bytes(path.read_bytes()[:50])


def no_classes():
    pictures(Path("pets"), 4)


def truncated_idx():
    idx_files(Path("sets/mnist"))
    path = Path("sets/mnist/train-images-idx3-ubyte")
    path.write_bytes(path.read_bytes()[:-100])


def label_out_of_range():
    idx_files(Path("sets/mnist"), torch.full((40,), 11, dtype=torch.uint8))


def truncated_cifar():
    folder = Path("sets/cifar10/cifar-10-batches-bin")
    folder.mkdir(parents=True)
    for word in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (folder / f"{word}.bin").write_bytes(b"".join(bytes([number]) + bytes(3072) for number in range(10)))
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-7])


def syntax_error():
    Path("wrong.py").write_text("import torch\n\ndef make(:\n    pass\n")


def data_functions():
    Path("mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n\n\n"
        "def raises():\n    raise ConnectionError('the database is down')\n\n\n"
        "def nothing():\n    return None\n\n\n"
        "def label():\n"
        "    made = TensorDataset(torch.zeros(9, 1, 8, 8), torch.tensor([0, 1, 2, 3, 7, 1, 2, 0, 1]))\n"
        "    made.classes = ['a', 'b', 'c', 'd']\n"
        "    return made, None\n"
    )


def other_folder():
    Path("letters").mkdir()
    Path("letters/diary.txt").write_text("dear diary")


def nothing_special():
    pass


CASES = {
    "missing-folder": (nothing_special, ["./nowhere", "mlp"], ["there is no folder ./nowhere"]),
    "unknown-data": (nothing_special, ["digts"], ['no data set is called "digts"', 'did you mean "digits"?']),
    "unknown-model": (nothing_special, ["digits", "resnt18"], ['did you mean "resnet18"?']),
    "unknown-option": (nothing_special, ["digits", "--train.lrr", "3"], ['did you mean "train.lr"?']),
    "wrong-type": (nothing_special, ["digits", "--set", "train.batch=many"], ["train.batch", "many"]),
    "empty-class": (empty_class, ["pets", "mlp"], ['the class folder "dogs" has no pictures', "pets/dogs"]),
    "one-class": (one_class, ["pets", "mlp"], ["only one class folder"]),
    "no-classes": (no_classes, ["pets", "mlp"], ["has no class folders; pictures directly in the folder: 4"]),
    "corrupt-picture": (corrupt_picture, ["pets", "mlp"], ["2.png", "pets/dogs/2.png", "skip-corrupt"]),
    "truncated-idx": (
        truncated_idx,
        ["mnist", "mlp", "--data-dir", "sets"],
        ["expected 31,360 values (40 x 28 x 28), found 31,260", "train-images-idx3-ubyte"],
    ),
    "truncated-cifar": (truncated_cifar, ["cifar10", "mlp", "--data-dir", "sets"], ["data_batch_3.bin", "30,723"]),
    "idx-label": (label_out_of_range, ["mnist", "mlp", "--data-dir", "sets"], ["label of sample 0 is 11"]),
    "user-label": (data_functions, ["mine.py:label", "mlp"], ["label", "7", "4"]),
    "few-outputs": (nothing_special, ["digits", "mlp", "--set", "model.num_classes=4"], ["10 classes"]),
    "missing-file": (nothing_special, ["digits", "absent.py:Net"], ["there is no file absent.py"]),
    "missing-object": (nothing_special, ["digits", f"{NETS}:Nett"], ['did you mean "Net"?']),
    "syntax-error": (syntax_error, ["digits", "wrong.py:make"], ["wrong.py:3", "def make(:", "SyntaxError"]),
    "model-raises": (nothing_special, ["digits", f"{NETS}:broken"], ["nets.py:", "the weights are elsewhere"]),
    "data-raises": (data_functions, ["mine.py:raises", "mlp"], ["mine.py:6", "the database is down"]),
    "data-nothing": (data_functions, ["mine.py:nothing", "mlp"], ["returned a NoneType, not a pair"]),
    "unwritable": (nothing_special, ["digits", "--out", "/proc/nowhere"], ["/proc/nowhere", "can't be created"]),
    "out-is-file": (syntax_error, ["digits", "--out", "wrong.py"], ["wrong.py is a file"]),
    "out-is-other": (other_folder, ["digits", "--out", "letters"], ["letters is not empty and contains no run"]),
    "resume-nothing": (nothing_special, ["digits", "--resume", "old/run"], ["old/run doesn't exist"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_gets_one_screen(name, capsys):
    prepare, arguments, wanted = CASES[name]
    prepare()
    before = everything()
    code, err = call(capsys, "train", *arguments)
    assert code == 2, err
    assert_one_screen(err)
    for text in wanted:
        assert text in err, err
    assert everything() == before


def test_an_existing_empty_folder_stays(capsys):
    Path("mine").mkdir()
    assert call(capsys, "train", "digits", "resnt18", "--out", "mine")[0] == 2
    assert Path("mine").is_dir()


def test_folders_made_for_a_mistaken_run_go_again(capsys):
    assert call(capsys, "train", "digits", "resnt18", "--out", "a/b/c")[0] == 2
    assert not Path("a").exists()


def test_many_mistakes_are_told_at_once(capsys):
    _, err = call(capsys, "train", "digits", "--train.lr", "-1", "--train.batchh", "3", "--set", "data.channels=2")
    for text in ("train.lr", "train.batchh", "data.channels"):
        assert text in err, err


def test_a_switch_by_its_path_needs_no_value(capsys):
    corrupt_picture()
    code, err = call(capsys, "train", "pets", "mlp", "--epochs", "1", "--data.skip-corrupt", "--data.validation", "0.4")
    assert code == 0, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with two checkpoints, of one epoch each."""
    folder = tmp_path_factory.mktemp("trained")
    meet = ["--init", f"file://{folder}/meet", "--world-size", "1", "--rank", "0"]
    flags = ["--epochs", "2", "--set", "checkpoint.every=1epoch", "--out", folder / "run"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "mlp", "-q", *map(str, flags), *QUICK, *meet])
    assert ended.value.code == 0
    return folder / "run"


def checkpoints(run):
    return sorted((run / "checkpoints").glob("step-*"))


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_another_networks_checkpoint_is_refused(trained, capsys):
    code, err = call(capsys, "train", "digits", "cnn", "--resume", trained)
    assert code == 2
    assert_one_screen(err)
    assert "the checkpoint belongs to another network" in err
    assert not Path("runs").exists()


def test_a_torn_checkpoint_is_refused_when_it_is_named(trained, capsys):
    copy = shutil.copytree(trained, "copy")
    torn = checkpoints(Path(copy))[-1]
    flip_a_byte(torn / "model.safetensors")
    code, err = call(capsys, "train", "digits", "mlp", "--resume", torn)
    assert code == 2
    assert_one_screen(err)
    assert "model.safetensors has the SHA-256" in err


@pytest.mark.parametrize("how", ["auto", "run"])
def test_a_torn_checkpoint_is_passed_over_with_a_warning(how, trained, capsys):
    copy = Path(shutil.copytree(trained, "copy"))
    first, torn = checkpoints(copy)
    flip_a_byte(torn / "model.safetensors")
    where = ["--out", copy, "--resume", "auto"] if how == "auto" else ["--out", "new", "--resume", copy]
    code, err = call(capsys, "train", "digits", "mlp", "--epochs", "3", *where)
    assert code == 0, err
    folder = copy if how == "auto" else Path("new")
    assert any(f"{torn.name} was skipped" in event["message"] for event in events(folder, "warning"))
    assert f"WARNING {torn.name} was skipped" in err
    assert events(folder, "resumed")[-1]["step"] == int(first.name.removeprefix("step-"))


def test_a_run_with_torn_checkpoints_alone_is_not_begun_anew(trained, capsys):
    copy = Path(shutil.copytree(trained, "copy"))
    for path in checkpoints(copy):
        flip_a_byte(path / "model.safetensors")
    code, err = call(capsys, "train", "digits", "mlp", "--out", copy, "--epochs", "3", "--resume", "auto")
    assert code == 2
    assert_one_screen(err)
    assert "can be read" in err
    assert len(checkpoints(copy)) == 2


def test_two_runs_never_share_a_folder(tmp_path, capsys):
    place = tmp_path / "run"
    (place / "ranks").mkdir(parents=True)
    with FileLock(place / "ranks" / "lock"):
        code, err = call(capsys, "train", "digits", "mlp", "--out", str(place))
    assert code == 2
    assert "a run is active in" in err
    assert not (place / "job.toml").exists()


def test_a_short_flag_is_not_the_value_of_a_switch(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "mlp", "--data.skip-corrupt", "-n", "2", "--train.lr", "0.5", "--dry-run"])
    assert ended.value.code == 0
    assert "2 processes" in capsys.readouterr().out


def test_one_machine_by_two_names_is_told_before_anything_starts(here):
    ended = run("launch", "digits", "mlp", "--hosts", "localhost,127.0.0.1", "--out", "run")
    assert ended.code == 3
    assert "localhost and 127.0.0.1 are the same machine" in ended.err
    assert 'do:    list the machine once, with 2 processes: "localhost slots=2"' in ended.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("mesh", "told"), [("tp=4", "is for 4 processes, but the run has 2"), ("tp=1000000000", "is not a mesh")]
)
def test_a_dry_run_refuses_a_mesh_of_another_size(mesh, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "mlp", "--mesh", mesh, "-n", "2", "--dry-run"])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert_one_screen(err)
    assert told in err


@pytest.mark.slow
def test_names_with_shell_commands_stay_names(here):
    trick = "$(touch executed)"
    for name in (trick, "`touch executed`", "; touch executed;"):
        pictures(Path(trick) / name, 8)
    job = [trick, "mlp", "--epochs", "1", "--batch", "4", "-n", "2", "--set", "train.channels_last=false"]
    ended = run("train", *job, "--out", f"run {trick}")
    assert ended.code == 0, ended.err
    assert trick in Path(f"run {trick}/report.html").read_text(encoding="utf-8")
    refused = run("launch", *job[:4], "--hosts", f"-oProxyCommand={trick}")
    assert refused.code == 2, refused.err
    assert not list(Path().rglob("executed"))
