from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.models.build import build_model, describe, resolve_model
from manyhands.models.options import ModelOptions


def build(name: str, *, size: int = 8, channels: int = 3, **options) -> nn.Module:
    return build_model(ModelOptions(name=name, **options), channels=channels, size=size, num_classes=4)


def test_small_pictures_take_the_cifar_stem_and_say_so():
    needs = describe(ModelOptions(name="resnet18"), 32)
    assert (needs.channels, needs.size) == (None, None)
    (note,) = needs.notes
    assert note.startswith("resnet18 with the CIFAR stem (3x3, no max-pool) because pictures are 32 px")
    assert note.endswith("torchvision:resnet18 is the original")
    assert build("resnet18", size=32, channels=1).conv1.kernel_size == (3, 3)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 65), ("torchvision:resnet18", 32), ("torchvision:resnet18", 64)]
)
def test_the_original_resnet(name: str, size: int):
    assert describe(ModelOptions(name=name), size).notes == []
    assert build(name, size=size).conv1.kernel_size == (7, 7)
    assert describe(ModelOptions(name="resnet18", pretrained=True), size).channels == 3


def test_pictures_of_64_px_keep_the_original_stem_and_the_other_is_priced():
    (note,) = describe(ModelOptions(name="resnet18"), 64).notes
    assert "cifar:resnet18 keeps every pixel (3x3 stem, no max-pool) at about 16 times the cost" in note
    assert build("resnet18", size=64).conv1.kernel_size == (7, 7)
    assert build("cifar:resnet18", size=64).conv1.kernel_size == (3, 3)
    assert describe(ModelOptions(name="resnet18", pretrained=True), 64).notes == []


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18", "cifar:resnet18", "cnn"])
def test_a_settled_name_means_the_same_network_at_any_size(name: str, size: int):
    settled = resolve_model(ModelOptions(name=name), size)
    shapes = [
        {
            key: value.shape
            for key, value in build_model(options, channels=3, size=size, num_classes=4).state_dict().items()
        }
        for options in (ModelOptions(name=name), settled)
    ]
    assert shapes[0] == shapes[1]
    assert resolve_model(settled, 224).name == settled.name
    assert settled.name in {"cifar:resnet18", "torchvision:resnet18", "cnn"}


@pytest.mark.parametrize(
    ("name", "arguments", "size", "expected"),
    [
        ("inception_v3", {}, 224, 299),
        ("vit_b_16", {}, 32, 224),
        ("vit_b_16", {"image_size": 32}, 28, 32),
        ("maxvit_t", {"input_size": [112, 112]}, 224, 112),
        ("alexnet", {}, 32, 224),
        ("alexnet", {}, 64, None),
        ("swin_t", {}, 32, None),
        ("mlp", {}, 3, None),
        ("cnn", {}, 5, 8),
    ],
)
def test_sizes_that_networks_ask_for(name: str, arguments: dict, size: int, expected: int | None):
    needs = describe(ModelOptions(name=name, arguments=arguments), size)
    assert needs.size == expected
    assert bool(needs.notes) == (expected is not None)


def test_nothing_is_noted_where_pictures_suit():
    needs = describe(ModelOptions(name="vit_b_16"), 224)
    assert (needs.channels, needs.size, needs.notes) == (3, 224, [])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("squeezenet1_1", {"size": 64, "channels": 1}, "3 channels, not 1"),
        ("inception_v3", {"size": 64}, "299 px, not 64"),
        ("renset18", {}, 'did you mean "resnet18"?'),
        ("torchvision:renset18", {}, 'did you mean "torchvision:resnet18"?'),
        ("torchvision:mlp", {}, "torchvision:mlp"),
        ("mlp", {"pretrained": True}, "no published weights"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict, words: str):
    with pytest.raises(UserError) as caught:
        build(name, **options)
    assert words in str(caught.value)


def test_the_networks_own_number_of_classes_wins():
    assert build("mlp", num_classes=9)(torch.zeros(1, 3, 8, 8)).shape == (1, 9)


def test_the_mlp_of_the_source_documents():
    model = build_model(ModelOptions(name="mlp"), channels=1, size=28, num_classes=10)
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert sum(p.numel() for p in model.parameters()) == 784 * 256 + 256 + 256 * 10 + 10
    deep = build("mlp", arguments={"hidden": 5, "depth": 3, "dropout": 0.5})
    assert [layer.out_features for layer in deep if isinstance(layer, nn.Linear)] == [5, 5, 5, 4]


@pytest.mark.parametrize(
    ("name", "arguments", "place"),
    [
        ("mlp", {"hiden": 5}, "hiden"),
        ("mlp", {"hidden": "many"}, "hidden"),
        ("mlp", {"depth": -1}, "depth"),
        ("mlp", {"dropout": 1}, "dropout"),
        ("cnn", {"width": 0}, "width"),
        ("cnn", {"dropout": -0.1}, "dropout"),
        ("cnn", {"num_classes": 3}, "num_classes"),
        ("resnet18", {"zero_init": True}, "zero_init"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "weights"),
        ("squeezenet1_1", {"dropuot": 0.1}, "dropuot"),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict, place: str):
    with pytest.raises(UserError) as caught:
        build(name, size=64, arguments=arguments)
    assert caught.value.where == f"model.arguments.{place}"
    if place == "hiden":
        assert 'did you mean "hidden"?' in str(caught.value)


USER_FILE = """
from torch import nn
class Net(nn.Module):
    def __init__(self, num_classes, hidden=3):
        super().__init__()
        self.hidden, self.head = hidden, nn.Linear(12, num_classes)
    def forward(self, pictures):
        return self.head(pictures.flatten(1))
class Plain(nn.Module):
    pass
def make(hidden):
    return Net(2, hidden)
def broken(num_classes):
    return nn.Linear("twelve", num_classes)
def nothing():
    return 3
made = Net(5)
number = 7
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"net_{abs(hash(request.node.name))}.py"
    path.write_text(USER_FILE)
    return path


def test_a_users_class_is_given_the_number_of_classes(user_file: Path):
    model = build(f"{user_file}:Net", arguments={"hidden": 8})
    assert (model.hidden, model.head.out_features) == (8, 4)
    assert describe(ModelOptions(name=f"{user_file}:Net"), 8).channels is None


def test_a_users_function_and_network(user_file: Path):
    assert build(f"{user_file}:make", arguments={"hidden": 8}).head.out_features == 2
    first, second = build(f"{user_file}:made"), build(f"{user_file}:made")
    assert first.head.out_features == 5
    nn.init.zeros_(first.head.weight)
    assert bool(second.head.weight.any())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Nt", {}, 'did you mean "Net"'),
        ("Net", {"hiden": 1}, "hiden"),
        ("Plain", {"hiden": 1}, "hiden"),
        ("make", {}, "hidden"),
        ("made", {"hidden": 1}, "takes no arguments"),
        ("nothing", {}, "returned a int"),
        ("number", {}, "is a int"),
        ("broken", {}, "failed: TypeError"),
    ],
)
def test_what_is_no_network_is_refused(user_file: Path, name: str, arguments: dict, message: str):
    with pytest.raises(UserError) as caught:
        build(f"{user_file}:{name}", arguments=arguments)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) < 8


def test_a_users_network_has_no_published_weights(user_file: Path):
    with pytest.raises(UserError, match="no published weights"):
        build(f"{user_file}:Net", pretrained=True)


MESHED = """
from torch import nn

class Needs(nn.Linear):
    def __init__(self, num_classes, mesh):
        super().__init__(2, num_classes)
        self.mesh = mesh

class MayHave(nn.Linear):
    def __init__(self, mesh="none"):
        super().__init__(2, 2)
        self.mesh = mesh
"""


def test_a_users_network_gets_the_mesh(tmp_path: Path):
    (tmp_path / "meshed.py").write_text(MESHED)

    def mesh_of(name: str, mesh: object, own: dict | None = None) -> object:
        options = ModelOptions(name=f"{tmp_path}/meshed.py:{name}", arguments=own or {})
        return build_model(options, channels=1, size=1, num_classes=3, mesh=mesh).mesh

    mesh = object()
    assert mesh_of("Needs", mesh) is mesh_of("MayHave", mesh) is mesh
    assert mesh_of("MayHave", None) == "none"
    assert mesh_of("Needs", None, {"mesh": "own"}) == mesh_of("Needs", mesh, {"mesh": "own"}) == "own"
    with pytest.raises(UserError, match="Needs requires a mesh, but this parallel mode has none"):
        mesh_of("Needs", None)
