import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from manyhands.checkpoint.describe import ALONE, NetworkLayout
from manyhands.checkpoint.folders import find_checkpoint
from manyhands.checkpoint.foreign import name_optimizer, read_foreign, write_foreign
from manyhands.checkpoint.read import load_checkpoint, open_checkpoint
from manyhands.checkpoint.reshard import merge, reshard
from manyhands.checkpoint.snapshot import Snapshot, renamed
from manyhands.checkpoint.write import save_unsharded
from manyhands.core.errors import UserError
from manyhands.core.mesh import TensorLayout
from manyhands.train.parts import load_initial_weights
from manyhands.train.state import load_snapshot, matching_state_dict


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    pictures = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)
    nn.functional.cross_entropy(model(pictures), torch.tensor([1, 2])).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)


def assert_read_as(model: nn.Module, file: Path, other: nn.Module) -> None:
    """Another network of the same class gets the file's weights, which are the model's."""
    other.load_state_dict(matching_state_dict(read_foreign(file), other, "here"))
    found = other.state_dict()
    assert all(torch.equal(one, found[name]) for name, one in model.state_dict().items() if torch.is_tensor(one))


def main_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str, best: object) -> dict:
    """Equal in structure to what imagenet/main.py hands to torch.save."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    state = model.state_dict()
    for name in list(state):
        state[prefix + name] = state.pop(name)
    return {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": state,
        "best_acc1": best,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize(
    ("figure", "best"), [("best_acc1", torch.tensor(62.5)), ("best_acc1", 62.5), ("best_prec1", torch.tensor(62.5))]
)
def test_main_py_resumes_bit_for_bit(tmp_path: Path, prefix: str, figure: str, best: object):
    """Before 2019 the best figure had another name."""
    model = network()
    optimizer = sgd(model)
    step(model, optimizer)
    content = main_checkpoint(model, optimizer, prefix, best)
    content[figure] = content.pop("best_acc1")
    torch.save(content, tmp_path / "checkpoint.pth.tar")
    read = read_foreign(tmp_path / "checkpoint.pth.tar")
    assert read.state.pop("scheduler")["step_size"] == 30
    assert read.state == {"foreign": "imagenet-main", "arch": "resnet18", "epoch": 3, "best": {"top1": 0.625}}
    again = network()
    again.load_state_dict(matching_state_dict(read, again, "here"))
    read.model = dict(again.state_dict())
    named = name_optimizer(read.optimizer, [name for name, _ in again.named_parameters()])
    saved = load_checkpoint(save_unsharded(tmp_path, 1, Snapshot(read.model, named, read.state)))
    other = sgd(again)
    set_optimizer_state_dict(again, other, saved.optimizer)
    step(model, optimizer)
    step(again, other)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


def test_old_main_py_had_no_scheduler_and_wraps_only_the_features_of_vgg(tmp_path: Path):
    weights = {"features.module.0.weight": torch.ones(2), "classifier.0.weight": torch.zeros(2)}
    torch.save({"epoch": 1, "arch": "vgg11", "state_dict": weights, "best_acc1": 0}, tmp_path / "model_best.pth.tar")
    read = read_foreign(tmp_path / "model_best.pth.tar")
    assert list(renamed(read, ["features.0.weight", "classifier.0.weight"]).model) == [
        "features.0.weight", "classifier.0.weight"
    ]  # fmt: skip
    assert read.optimizer is None
    assert read.state["best"] == {"top1": 0.0}


def prefixed(prefix: str, weights: dict[str, object]) -> dict[str, object]:
    return {prefix + name: one for name, one in weights.items()}


# What others save of a network.
FORMS = {
    "plain": lambda model: model.state_dict(),
    "wrapped": lambda model: {"model": model.state_dict()},
    **{
        prefix: lambda model, prefix=prefix: prefixed(prefix, model.state_dict())
        for prefix in ("_forward_module.", "module.backbone.", "a.b.")
    },
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).state_dict(),
    "before torch counted batches": lambda model: {n: t for n, t in model.state_dict().items() if "num_b" not in n},
    "lightning": lambda model: {
        "epoch": 3, "state_dict": prefixed("model.", model.state_dict()), "pytorch-lightning_version": "2.2.0",
        "optimizer_states": [],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *[(form, "w.pth") for form in FORMS],
        ("plain", "w.pt"),
        ("plain", "old.pth"),
        ("plain", "w.safetensors"),
        ("lightning", "epoch=3.ckpt"),
    ],
)
def test_weights_are_read_in_the_forms_of_others(tmp_path: Path, form: str, name: str):
    model, file = network(), tmp_path / name
    model[1].running_mean += 1
    if name.endswith(".safetensors"):
        save_file(FORMS[form](model), file)
    else:
        torch.save(FORMS[form](model), file, _use_new_zipfile_serialization=name != "old.pth")
    read = read_foreign(find_checkpoint(file, "last"))
    assert read.optimizer is None
    assert read.state == {"foreign": "safetensors" if name.endswith(".safetensors") else "state-dict"}
    assert_read_as(model, file, network())


class Wrapped(nn.Module):
    """Whose parts hang below `self.module`."""

    def __init__(self):
        super().__init__()
        self.module = network()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_names_below_a_module_of_that_name_stay_also_through_merge_and_split(tmp_path: Path, suffix: str):
    model, file = Wrapped(), tmp_path / f"w{suffix}"
    merge(open_checkpoint(save_unsharded(tmp_path, 1, Snapshot(dict(model.state_dict())))), file)
    assert_read_as(model, file, Wrapped())
    for name in ("module.0.weight", "0.weight"):  # the network itself, and what it wraps
        wanted = {name: TensorLayout((4, 3, 3, 3), (4, 3, 3, 3))}
        reshard(open_checkpoint(file, wanted=wanted), tmp_path / name, NetworkLayout(ALONE, wanted))
        assert name in open_checkpoint(tmp_path / name).model.names()


def head(name: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 3)})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda file: matching_state_dict(read_foreign(file), network(), "here"),
            r"names in the file: module\.encoder\.weight, module\.encoder\.bias",
        ),
        (
            lambda _: matching_state_dict(Snapshot(dict(head("head").state_dict())), head("tail"), ""),
            "belongs to another network",  # though the names end alike
        ),
        (lambda _: matching_state_dict(Snapshot(dict.fromkeys("abcd", torch.ones(1))), head("e"), ""), "and 3 more"),
        (lambda _: name_optimizer(sgd(network()).state_dict(), ["a", "b"]), "has 6 parameters, this network has 2"),
        (lambda file: write_foreign(file, Snapshot({"w": torch.ones(1)}), "resnet18"), "optimizer"),
    ],
)
def test_another_networks_content_is_refused(tmp_path: Path, call, sentence: str):
    torch.save(prefixed("module.encoder.", nn.Linear(2, 3).state_dict()), tmp_path / "w.pth")
    with pytest.raises(UserError, match=sentence):
        call(tmp_path / "w.pth")


class NotStrict(nn.Linear):
    def load_state_dict(self, state_dict):
        return super().load_state_dict(state_dict)


def test_a_network_with_a_load_state_dict_of_its_own_is_called_as_plainly_as_possible():
    model, other = NotStrict(2, 2), NotStrict(2, 2)
    load_snapshot(Snapshot(dict(model.state_dict())), other, "here")
    assert torch.equal(model.weight, other.weight)


class Remembers(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scales = {"largest": float("inf"), "shape": (1, 2), "names": ["a", None]}

    def get_extra_state(self):
        return self.scales

    def set_extra_state(self, state):
        self.scales = state


def test_extra_state_of_modules_comes_with_the_weights_or_is_left_out_and_said(tmp_path: Path):
    model, other, lacks = (nn.Sequential(kind()) for kind in (Remembers, Remembers, lambda: nn.Linear(2, 2)))
    model[0].scales = {"largest": 3.0, "shape": (1, 2), "names": ["a", None]}
    torch.save({"model": prefixed("module.", model.state_dict())}, tmp_path / "w.pth")
    merge(open_checkpoint(tmp_path / "w.pth"), tmp_path / "merged.pth")
    saved = load_checkpoint(save_unsharded(tmp_path, 1, read_foreign(tmp_path / "merged.pth")))
    other.load_state_dict(matching_state_dict(saved, other, "here"))
    assert other[0].scales == model[0].scales
    torch.save(prefixed("backbone.", model.state_dict()), tmp_path / "other.pth")
    other[0].scales, notes = None, []
    journal: Any = SimpleNamespace(event=lambda _, message: notes.append(message))
    load_initial_weights(other, tmp_path / "other.pth", 2, journal)
    assert (other[0].scales, notes) == (model[0].scales, [])
    load_initial_weights(lacks, tmp_path / "other.pth", 2, journal)
    assert notes == ["0._extra_state: ignored, because the network has no such extra state"]
    assert torch.equal(lacks[0].weight, model[0].weight)


def script(file: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 3), torch.zeros(1, 2)), file)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (script, "is not loaded: TorchScript files contain code(.|\n)*torch.jit.load"),
        (lambda file: torch.save(network(), file), r"holds Python objects(.|\n)*state_dict\(\)"),
        (
            lambda file: file.write_bytes(b"cpytorch_lightning.utilities.parsing\nAttributeDict\n."),
            "holds Python objects(.|\n)*load_from_checkpoint",
        ),
    ],
)
def test_whole_objects_are_refused_on_one_screen(tmp_path: Path, write, sentence: str):
    write(tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=sentence) as caught:
        read_foreign(tmp_path / "a.ckpt")
    assert len(str(caught.value).splitlines()) < 8


class _Runs:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("how", ["zip", "older torch", "pickle 0", "pickle 5", "the whole file"])
def test_code_in_a_pickle_is_reported_as_code(tmp_path: Path, how: str):
    file, code = tmp_path / "model_best.pth.tar", _Runs(tmp_path / "mark")
    content = code if how == "the whole file" else {"state_dict": {"a": torch.ones(2)}, "x": code}
    if how in {"zip", "older torch"}:
        torch.save(content, file, _use_new_zipfile_serialization=how == "zip")
    else:
        content = code if how == "the whole file" else {"x": code}
        file.write_bytes(pickle.dumps(content, protocol=int(how[-1]) if how[-1].isdigit() else 2))
    with pytest.raises(UserError, match=r"holds Python objects \(posix\.system\), which are not loaded") as raised:
        read_foreign(file)
    assert "could run code" in raised.value.hints[0]
    assert not code.mark.exists()


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"epoch": "three"}, "epoch in checkpoint.pth.tar is 'three', expected a number"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": float("nan")}, "epoch"),
        ({"best_acc1": torch.ones(3)}, "best_acc1 in checkpoint.pth.tar is a tensor of 3 numbers"),
        ({"optimizer": {"state": {}}}, "optimizer state in checkpoint.pth.tar is not a torch.optim state_dict"),
        ({"optimizer": {"state": {9: {}}, "param_groups": [{"params": [0]}]}}, "optimizer"),
    ],
)
def test_values_of_wrong_kinds_are_named(tmp_path: Path, wrong: dict, reported: str):
    model = network()
    file = tmp_path / "checkpoint.pth.tar"
    torch.save({**main_checkpoint(model, sgd(model), "", 50.0), **wrong}, file)
    with pytest.raises(UserError, match=reported):
        read_foreign(file)


def test_damaged_and_other_files_are_refused(tmp_path: Path):
    torch.save(network().state_dict(), tmp_path / "cut.pth")
    whole = (tmp_path / "cut.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pth").touch()
    (tmp_path / "text.pth.tar").write_text("not a checkpoint\n")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UserError, match="damaged"):
            read_foreign(path)
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"epoch": 1}, tmp_path / "numbers.pth")
    for name in ("list.pth", "numbers.pth", "nowhere.pth"):
        with pytest.raises(UserError):
            read_foreign(tmp_path / name)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_what_we_write_main_py_can_load(tmp_path: Path, prefix: str):
    model = network()
    weights, biases = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizer = torch.optim.SGD([{"params": biases, "weight_decay": 0.0}, {"params": weights}], 0.1, momentum=0.9)
    step(model, optimizer)
    named = get_optimizer_state_dict(model, optimizer)
    state = {"epoch": 3, "best": {"step": 9, "top1": 0.625}}
    snapshot = load_checkpoint(save_unsharded(tmp_path / "ours", 9, Snapshot(dict(model.state_dict()), named, state)))
    path = write_foreign(tmp_path / "checkpoint.pth.tar", snapshot, "resnet18", prefix)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["checkpoint.pth.tar"]

    content = torch.load(path)
    again = network()
    other = sgd(again)
    scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=30, gamma=0.1)
    again.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in content["state_dict"].items()})
    other.load_state_dict(content["optimizer"])
    scheduler.load_state_dict(content["scheduler"])
    assert (content["epoch"], content["arch"], content["best_acc1"].item()) == (3, "resnet18", 62.5)
    assert (scheduler.last_epoch, scheduler._step_count) == (3, 4)  # torch counts its first step when it is created
    for (_, one), (_, two) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["momentum_buffer"], other.state[two]["momentum_buffer"])
    step(again, other)
