"""A run folder and another job: what is finished isn't relabelled, and what changes is named. All in this process."""

import contextlib
import functools
import json
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import manyhands
from manyhands.cluster.agents.mirror import RecordReceiver
from manyhands.cluster.agents.protocol import FilePiece
from manyhands.config.load import announce
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.user_code import code_digests
from manyhands.run.folder import read_network_record
from manyhands.train.objects import digest_objects as digest
from tests.e2e.command import alone, done, events, inside, messages, read, refused

RUN = Path("run")
FIT = {"out": RUN, "epochs": 1, "batch": 20, "lr": 0.1, "quiet": True, "run__report": False}
DATA = "synthetic:60x1x8x8x3"


def fit(**changes):
    return manyhands.fit("mlp", DATA, **{**FIT, **changes})


@pytest.fixture
def finished():
    return fit().path


def contents(suffix=""):
    return {path: path.read_bytes() for path in RUN.rglob(f"*{suffix}") if path.is_file()}


def test_a_finished_run_is_not_relabelled(finished):
    before = contents()
    for changes, message in (
        ({"lr": 0.01}, "train.lr is 0.01, and was 0.1"),
        ({"data__augment": "crop"}, 'data.augment is "crop", and was "auto"'),
    ):
        with pytest.raises(UserError) as raised:
            fit(**changes)
        assert message in raised.value.message
        longer, another = raised.value.hints
        assert "manyhands resume run --epochs 2" in longer
        assert 'out="run-2"' in another
        assert contents() == before
    train = f"train {DATA} mlp --epochs 1 --batch 20 --out run --lr 0.01"
    refused(train, by=alone, says="manyhands resume run --epochs 2 --set train.lr=0.01")
    refused("resume run --set train.lr=0.01", says="train longer")
    assert contents() == before
    assert fit().status == "finished"


def test_an_unfinished_run_is_not_continued_with_another_network_or_data_set():
    with pytest.raises(ManyhandsError, match="RuntimeError"):
        fit(epochs=2, at_epoch_end=failing)
    before = contents()
    for model, data, key in (("cnn", DATA, "model.name"), ("mlp", "synthetic:60x1x8x8x4", "data.name")):
        refused(f"train {data} {model} --out run", by=alone, says=("run holds another run", key, "--out run-2"))
        assert contents() == before
    assert fit(epochs=2).status == "finished"


class Small(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale, self.layers = scale, nn.Sequential(nn.Flatten(), nn.Linear(36, 2))

    def forward(self, x):
        return self.scale * self.layers(x)


def seeded(seed=0, frozen=False):
    torch.manual_seed(seed)
    model = Small()
    model.layers[1].bias.requires_grad_(not frozen)
    return model


def samples(count=60, sign=1, flipped=0):
    images = sign * torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, (torch.arange(count) + flipped) % 2)


def weighted(first):
    return lambda output, labels: cross_entropy(output, labels, weight=torch.tensor([first, 1.0]))


def right(output, labels):
    return output.argmax(1) == labels


def wrong(output, labels):
    return output.argmax(1) != labels


def of_objects(model=seeded, train_set=None, test_set=None, **changes):
    given = (model(), train_set or samples(), test_set or samples(20))
    return manyhands.fit(*given, **{**FIT, "loss": weighted(1.0), **changes})


@pytest.mark.parametrize(
    ("first", "changes", "message"),
    [
        ({}, {"model": lambda: Small(2.0)}, "network changed"),
        ({}, {"model": lambda: seeded(1)}, "initial weights changed"),
        ({}, {"model": lambda: seeded(frozen=True)}, "trainable parameters changed"),
        ({}, {"train_set": samples(flipped=1)}, "training data changed"),
        ({}, {"train_set": samples(sign=-1)}, "training samples changed"),
        ({}, {"test_set": samples(20, flipped=1)}, "test data changed"),
        ({}, {"loss": weighted(2.0)}, "loss changed"),
        ({}, {"metrics": {"m": right}}, 'train.metrics is ["object:m"], and was []'),
        ({"metrics": {"m": right}}, {"metrics": {"m": wrong}}, "metric m changed"),
        ({}, {"held_out_set": samples(10)}, "held-out data changed"),
        ({"held_out_set": samples(10)}, {"held_out_set": samples(10, flipped=1)}, "held-out data changed"),
    ],
)
def test_a_finished_run_of_other_objects_is_not_returned(first, changes, message):
    of_objects(**first)
    assert of_objects(**first).status == "finished"
    before, other = contents(), {**first, **changes}
    with pytest.raises(UserError) as raised:
        of_objects(**other)
    assert message in raised.value.message
    assert "held-out" not in message or "test" not in raised.value.message.replace(str(RUN.resolve()), "")
    assert raised.value.where == "out"
    longer, another, *more = raised.value.hints
    assert 'fit(…, epochs=2, checkpoint__resume="auto")' in longer
    assert another == 'to train from scratch, use out="run-2"'
    assert contents() == before
    if message == "initial weights changed":
        assert more == ['to return the finished run, pass checkpoint__resume="auto"']
        assert of_objects(**other, checkpoint__resume="auto").status == "finished"
        return
    with pytest.raises(UserError, match=re.escape(f"the changes would have no effect: {message}")):
        of_objects(**other, checkpoint__resume="auto")
    if "loss" in changes:  # it may train longer
        assert of_objects(**other, epochs=2, checkpoint__resume="auto").status == "finished"
        assert of_objects(**other, epochs=2).status == "finished"


def test_finished_run_is_returned_for_its_own_random_or_undigested_weights():
    model = seeded()
    for _ in range(2):
        assert of_objects(lambda: model).status == "finished"
    torch.seed()
    assert of_objects(Small).status == "finished"
    record = read(RUN, "network.json")
    for name in ("initial weights", "trainable parameters", "held-out data"):
        del record["digests"][name]
    (RUN / "network.json").write_text(json.dumps(record))
    assert of_objects(lambda: seeded(1, frozen=True)).status == "finished"


CODE = {
    "c.py": "from torch import nn\nimport hp\nnet = nn.Sequential(nn.Flatten(), nn.Linear(64, hp.OUTPUTS))\n",
    "hp.py": "from parts.more import OUTPUTS\nimport in_the_current_folder, torch\n",
    "parts/__init__.py": "from . import more\n",
    "parts/more.py": "OUTPUTS = 3\n",
}


def test_a_finished_run_of_changed_code_is_not_returned(capsys):
    Path("code/parts").mkdir(parents=True)
    for name, text in {**CODE, "unused.py": "", "../in_the_current_folder.py": ""}.items():
        Path("code", name).write_text(text)
    assert set(code_digests(["code/c.py:net"])) == {"code/c.py:net", *(f"code/{name}" for name in [*CODE][1:])}
    train = f"train {DATA} code/c.py:net --epochs 1 --batch 20 --out run"
    for _ in range(2):
        done(train, by=alone)
    for name, text in CODE.items():
        Path("code", name).write_text(f"{text}# changed\n")
        changed = "code/c.py:net changed" if name == "c.py" else f"code/{name} changed"
        refused(train, by=alone, says=(changed, "manyhands resume run --epochs 2", "--out run-2"))
        announce(["code/c.py:net"], RUN, read_network_record(RUN / "checkpoints/any"), "{}")
        assert "CHANGED since training" in capsys.readouterr().err
        Path("code", name).write_text(text)


class Named(TensorDataset):
    """A data set with class names."""

    def __init__(self, labels, classes):
        super().__init__(torch.linspace(-1, 1, 40).repeat_interleave(36).view(40, 1, 6, 6), labels)
        self.classes, self.targets = classes, labels


def failing(end):
    raise RuntimeError(str(end.epoch))


def interrupted(train_set, **changes):
    with pytest.raises(ManyhandsError, match="RuntimeError"):
        of_objects(train_set=train_set, epochs=2, at_epoch_end=failing, **changes)


HALVES = (torch.arange(40) >= 20).long()


@pytest.mark.parametrize("begin", [interrupted, of_objects])
def test_a_run_is_not_resumed_with_other_class_names(begin):
    begin(train_set=Named(HALVES, ["cat", "dog"]), test_set=Named(HALVES, ["cat", "dog"]))
    before = contents(".safetensors")
    for names, message in (
        (["dog", "cat"], 'the order of the classes changed from "cat", "dog" to "dog", "cat"'),
        (["cat", "owl"], 'the classes of the data changed: "dog" removed, "owl" added'),
        (["cafe\u0301", "dog"], 'the classes of the data changed: "cat" removed, "cafe\u0301" added'),
    ):
        other = {"train_set": Named(HALVES, names), "test_set": Named(HALVES, names)}
        with pytest.raises(UserError) as raised:
            of_objects(**other, epochs=2, checkpoint__resume="auto")
        assert message in raised.value.message
        assert raised.value.hints[0] == "undo the change of the class names"
        assert 'out="NEW"' in raised.value.hints[1]
        assert contents(".safetensors") == before
    # Numbers are no names.
    assert of_objects(train_set=samples(40), epochs=2, checkpoint__resume="auto").status == "finished"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: Small(2.0), "train_set": samples(flipped=1)}, "training data (labels)"),
        ({"train_set": samples(120)}, "training data (120 samples, was 60)"),
        ({"test_set": samples(20, sign=-1)}, "test samples"),
        ({"held_out_set": samples(10)}, "held-out data (10 samples, was 0)"),
    ],
)
def test_unfinished_run_resumes_with_changed_objects_and_reports_changed_data(changes, message, capsys):
    interrupted(samples())
    assert not any("the data changed" in line for line in messages(RUN, "warning"))
    assert of_objects(**changes, epochs=2, lr=0.01).status == "finished"
    assert [event["data"]["option"] for event in events(RUN, "changed")] == ["train.lr"]
    (found,) = (line for line in messages(RUN, "warning") if line.startswith("the data changed since the checkpoint"))
    assert message in found
    assert found in capsys.readouterr().err


def in_a_session(model, train_set, epochs=1):
    with manyhands.session(out=RUN, run__report=False) as here:
        call, optimizer, batches = here.prepare(model, torch.optim.SGD(model.parameters(), 0.1), train_set, batch=20)
        for _ in here.epochs(epochs):
            for x, y in batches:
                here.backward(cross_entropy(call(x), y))
                optimizer.step()
                optimizer.zero_grad()


def test_a_session_of_another_network_or_of_other_class_names_is_not_resumed(capsys):
    with contextlib.chdir(Path(tempfile.mkdtemp())):
        for _ in range(2):
            in_a_session(Small(), samples())
        with pytest.raises(UserError, match="network changed"):
            in_a_session(Small(2.0), samples())
        in_a_session(Small(2.0), samples(), epochs=2)
    in_a_session(Small(), Named(HALVES, ["cat", "dog"]))
    with pytest.raises(UserError, match="the order of the classes changed"):
        in_a_session(Small(), Named(HALVES, ["dog", "cat"]), 2)
    in_a_session(Small(), Named(1 - HALVES, ["cat", "dog"]), 2)
    message = "the data changed since the checkpoint was saved: training data (labels), training samples\n"
    assert message in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(finished):
    shutil.rmtree(RUN / "checkpoints")
    metrics = (RUN / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="step 3 was saved, but the run has no checkpoint now"):
        fit()
    assert (RUN / "metrics.jsonl").read_bytes() == metrics


def test_every_command_that_takes_a_run_takes_a_part_of_its_name():
    fit(out=Path("runs/first"), epochs=3)
    for line, code, shown in (
        ("why irs", 0, "runs/first finished"),
        ("why last", 0, "runs/first finished"),
        ("why first", 0, "runs/first finished"),
        ("report irs", 0, "runs/first/report.html"),
        ("logs irs", 0, "step=1/9"),
        ("checkpoint merge irs merged.safetensors", 0, "wrote merged.safetensors"),
        ("eval irs", 0, "runs/first/checkpoints/step-0000000"),
        ("checkpoint info irs", 0, "runs/first/checkpoints/step-0000000"),
        ("stop irs", 2, "where: runs/first"),
        ("stop no-such-run", 2, 'no run is called "no-such-run"'),
        ("resume irs --set train.lr=0.01", 2, "where: runs/first"),
    ):
        said = done(line, by=inside, code=code)
        assert shown in said.out + said.err
    refused("resume fir --epochs 1", says=("this run has made 9 updates", "where: runs/first"))


@pytest.mark.slow
def test_run_with_python_objects_resumes_in_its_program():
    manyhands.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), DATA, **{**FIT, "precision": "fp32"})
    before = Path("run/events.jsonl").read_bytes()
    program = "this run can be resumed only by the Python program that creates its network\n"
    refused("resume run", says=(program, "to resume, run the same program with out='run'\n"))
    assert Path("run/events.jsonl").read_bytes() == before
    assert "manyhands resume" not in done("stop run", code=2).err
    Path("net.py").write_text("from torch import nn\nnet = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n")
    done("resume run --epochs 2 --set model.name=net.py:net")


def test_the_job_changes_only_once_a_step_was_trained_under_it(finished):
    def failing(output, labels):
        if output.requires_grad and len(labels) == 20:
            raise RuntimeError("never a step")
        return cross_entropy(output, labels)

    before = {name: (RUN / name).read_bytes() for name in ("job.toml", "plan.json", "env.json")}
    with pytest.raises(ManyhandsError, match="never a step"):
        fit(epochs=2, lr=0.01, checkpoint__resume="auto", loss=failing)
    assert {name: (RUN / name).read_bytes() for name in before} == before
    assert not events(RUN, "changed")
    fit(epochs=2, lr=0.01, checkpoint__resume="auto")
    changes = [(event["step"], *event["data"].values()) for event in events(RUN, "changed")]
    assert sorted(changes) == [(3, "train.epochs", 1, 2), (3, "train.lr", 0.1, 0.01)]
    jobs = [tomllib.loads((RUN / name).read_text()) for name in ("job-1.toml", "job.toml")]
    assert [each["train"]["lr"] for each in jobs] == [0.1, 0.01]


def test_the_heads_copy_keeps_the_former_job_too(tmp_path):
    receiver = RecordReceiver(tmp_path)
    for lr in (0.1, 0.2):
        receiver.write_piece(FilePiece("job.toml", f"[train]\nlr = {lr}\n"))
    assert not (tmp_path / "job-1.toml").exists()
    receiver.write_piece(FilePiece("metrics.jsonl", "{}\n"))
    receiver.write_piece(FilePiece("job.toml", "[train]\nlr = 0.3\n"))
    assert (tmp_path / "job-1.toml").read_text() == "[train]\nlr = 0.2\n"


class Focal:
    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, output, labels):
        return output.sum() * self.gamma


def _weighed(output, labels, weight=1.0):
    return output.sum() * weight


def test_digests_of_objects_tell_changes_alone():
    assert digest(loss=Focal(1)) == digest(loss=Focal(1)) != digest(loss=Focal(5))
    assert digest(loss=functools.partial(_weighed, weight=2)) != digest(loss=functools.partial(_weighed, weight=3))
    assert digest(loss=functools.partial(_weighed)) != digest(loss=functools.partial(right))
    first, second = lambda output, labels: output.sum(), lambda output, labels: output.mean()
    assert digest(loss=first) != digest(loss=second)
    # As in a notebook, whose classes have no source that Python finds.
    nets = []
    for body in ("x.relu()", "x.tanh()"):
        names = {"nn": nn, "__name__": "torch_nets"}
        exec(f"class Net(nn.Module):\n    def forward(self, x):\n        return {body}\n", names)
        nets.append(digest(network=names["Net"]()))
    assert nets[0] != nets[1]
    # No process sorts a set's words alike; these numbers are sorted as they come.
    assert [*{0, 8}] != [*{8, 0}]
    assert digest(loss=functools.partial(_weighed, weight={0, 8})) == digest(
        loss=functools.partial(_weighed, weight={8, 0})
    )
