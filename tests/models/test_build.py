"""Networks by name, with their arguments and published weights, and what their outputs are."""

import pickle
import socket
import time
from pathlib import Path

import pytest
import torch
from tests.models.test_law import ZOO
from tests.processes.updates import train
from torch import nn
from torchvision import models
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from manyhands.core import download
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.models.architectures import torchvision as zoo
from manyhands.models.build import build_model, picture_needs, resolve_model
from manyhands.models.interface import main_and_auxiliary
from manyhands.models.options import ModelOptions


def build(name: str, *, size: int = 8, channels: int = 3, classes: int = 4, **options) -> nn.Module:
    return build_model(ModelOptions(name=name, **options), channels=channels, size=size, num_classes=classes)


@pytest.mark.parametrize(
    ("name", "size", "kernel", "words"),
    [
        ("resnet18", 32, 3, "uses the CIFAR stem (3x3, no max-pool) because pictures are 32 px"),
        ("resnet18", 64, 7, "cifar:resnet18 keeps every pixel (3x3 stem, no max-pool) at about 16 times the cost"),
        ("cifar:resnet18", 64, 3, "uses the CIFAR stem (3x3, no max-pool) because pictures are 64 px"),
        ("resnet18", 65, 7, ""),
        ("torchvision:resnet18", 32, 7, ""),
        ("cnn", 64, 3, ""),
    ],
)
def test_the_stem_of_resnets_suits_the_pictures_and_a_settled_name_means_the_same_at_any_size(
    meta, name, size, kernel, words
):
    needs = picture_needs(ModelOptions(name=name), size)
    assert (needs.channels, needs.size, len(needs.notes)) == (3 * (kernel == 7) or None, None, bool(words))
    assert words in "".join(needs.notes)
    resolved, channels = resolve_model(ModelOptions(name=name), size), 3 if kernel == 7 else 1
    asked, again = (build(each, size=size, channels=channels) for each in (name, resolved.name))
    assert next(one for one in asked.modules() if isinstance(one, nn.Conv2d)).kernel_size == (kernel, kernel)
    assert {key: one.shape for key, one in asked.state_dict().items()} == {
        key: one.shape for key, one in again.state_dict().items()
    }
    assert resolve_model(resolved, 224).name == resolved.name
    assert picture_needs(ModelOptions(name="resnet18", pretrained=True), size).notes == []


@pytest.mark.parametrize(
    ("name", "arguments", "size", "expected"),
    [
        ("inception_v3", {}, 224, 299),
        ("vit_b_16", {"image_size": 32}, 28, 32),
        ("maxvit_t", {"input_size": [112, 112]}, 224, 112),
        ("alexnet", {}, 32, 224),
        ("alexnet", {}, 64, None),
        ("swin_t", {}, 32, None),
        ("vit_b_16", {}, 224, 224),
        ("cnn", {}, 5, 8),
    ],
)
def test_sizes_that_networks_ask_for(name: str, arguments: dict, size: int, expected: int | None):
    needs = picture_needs(ModelOptions(name=name, arguments=arguments), size)
    assert needs.size == expected
    assert bool(needs.notes) == (expected not in (None, size))


def test_the_mlp_of_the_source_documents():
    model = build_model(ModelOptions(name="mlp"), channels=1, size=28, num_classes=10)
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert sum(p.numel() for p in model.parameters()) == 784 * 256 + 256 + 256 * 10 + 10
    deep = build("mlp", arguments={"hidden": 5, "depth": 3, "dropout": 0.5}, num_classes=9)
    assert [layer.out_features for layer in deep if isinstance(layer, nn.Linear)] == [5, 5, 5, 9]


@pytest.mark.parametrize(
    ("name", "arguments", "place"),
    [
        ("mlp", {"hiden": 5}, "hiden"),
        ("mlp", {"hidden": "many"}, "hidden"),
        ("mlp", {"dropout": 1}, "dropout"),
        ("cnn", {"width": 0}, "width"),
        ("cnn", {"num_classes": 3}, "num_classes"),
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

class Needs(nn.Linear):
    def __init__(self, num_classes, mesh):
        super().__init__(2, num_classes)
        self.mesh = mesh
class MayHave(nn.Linear):
    def __init__(self, mesh="none"):
        super().__init__(2, 2)
        self.mesh = mesh
def make(hidden):
    return Net(2, hidden)
def broken(num_classes):
    return nn.Linear("twelve", num_classes)
def nothing():
    return 3
made = Net(5)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(USER_FILE)
    return tmp_path / "net.py"


def test_a_users_class_function_and_network(user_file: Path):
    model = build(f"{user_file}:Net", arguments={"hidden": 8})
    assert (model.hidden, model.head.out_features) == (8, 4)
    assert build(f"{user_file}:make", arguments={"hidden": 8}).head.out_features == 2
    first, second = build(f"{user_file}:made"), build(f"{user_file}:made")
    assert first.head.out_features == 5
    nn.init.zeros_(first.head.weight)
    assert bool(second.head.weight.any())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("squeezenet1_1", {"size": 64, "channels": 1}, "3 channels, not 1"),
        ("inception_v3", {"size": 64}, "299 px, not 64"),
        ("renset18", {}, 'did you mean "resnet18"?'),
        ("torchvision:renset18", {}, 'did you mean "torchvision:resnet18"?'),
        ("mlp", {"pretrained": True}, "no published weights"),
        ("FILE:Nt", {}, 'did you mean "Net"'),
        ("FILE:Net", {"arguments": {"hiden": 1}}, "hiden"),
        ("FILE:make", {}, "hidden"),
        ("FILE:made", {"arguments": {"hidden": 1}}, "takes no arguments"),
        ("FILE:nothing", {}, "returned a int"),
        ("FILE:broken", {}, "failed: TypeError"),
    ],
)
def test_what_is_no_network_is_refused(user_file, name, options, message):
    with pytest.raises(UserError) as caught:
        build(name.replace("FILE", str(user_file)), **options)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) < 8


def test_a_users_network_gets_the_mesh(user_file: Path):
    def mesh_of(name: str, mesh: object, own: dict | None = None) -> object:
        options = ModelOptions(name=f"{user_file}:{name}", arguments=own or {})
        return build_model(options, channels=1, size=1, num_classes=3, mesh=mesh).mesh

    mesh = object()
    assert mesh_of("Needs", mesh) is mesh_of("MayHave", mesh) is mesh
    assert mesh_of("MayHave", None) == "none"
    assert mesh_of("Needs", None, {"mesh": "own"}) == mesh_of("Needs", mesh, {"mesh": "own"}) == "own"
    with pytest.raises(UserError, match="Needs requires a mesh, but this parallel mode has none"):
        mesh_of("Needs", None)


ONE, TWO, THREE = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 2.0)


@pytest.mark.parametrize(
    ("output", "weights"),
    [
        (ONE, []),
        (GoogLeNetOutputs(ONE, TWO, THREE), [0.3, 0.3]),
        (InceptionOutputs(ONE, TWO), [0.4]),
        ((ONE, TWO), [0.4]),
        ([ONE], []),
    ],
)
def test_the_first_output_is_the_main_one(output: object, weights: list[float]):
    main, heads = main_and_auxiliary(output)
    assert main is ONE
    assert [weight for _, weight in heads] == weights


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (None, "nothing"),
        ({"logits": ONE}, r"a dict of logits: a tensor \[2, 3\]"),
        ((None, ONE), r"a tuple of nothing, a tensor \[2, 3\]"),
        ((ONE, "x"), r"a tuple of a tensor \[2, 3\], a str"),
        ((ONE, torch.zeros(2)), r"a tuple of a tensor \[2, 3\], a tensor \[2\]"),
        (torch.zeros(2, 3, 7, 7), r"a tensor \[2, 3, 7, 7\]"),
    ],
)
def test_anything_else_is_refused_with_what_it_is(output: object, shown: str):
    with pytest.raises(UserError, match=f"forward returns {shown}\n") as raised:
        main_and_auxiliary(output)
    assert "[N, classes]" in raised.value.hints[0]


def test_the_first_layer_of_quicknet_whitens_patches_and_has_the_opposites():
    net = build("quicknet", size=32, arguments={"widths": [8, 16, 24]})
    assert net.head.weight.shape == (4, 24)
    with pytest.raises(UserError, match="three whole numbers"):
        build("quicknet", size=32, arguments={"widths": [8, 16]})
    noise = torch.rand(200, 3, 34, 34, generator=torch.Generator().manual_seed(2))
    smooth = nn.functional.avg_pool2d(noise, 3, 1)
    pictures = 20 * (smooth - smooth.mean())
    net.initialize(pictures)
    found = net.whiten(pictures).transpose(0, 1).flatten(1).double()
    covariance = found @ found.T / found.shape[1]
    wanted = torch.kron(torch.tensor([[1, -1], [-1, 1]]), torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(covariance, wanted, atol=0.01, rtol=0)
    assert not net.whiten.weight.requires_grad


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (None, "uses the CIFAR stem"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), ""),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6)),
            "6 outputs for 5 classes; extra outputs count as wrong",
        ),
    ],
)
def test_a_run_records_notes_about_its_network(make, note):
    notes = train(World(), 1, make, {"model.name": "resnet18"}).said("note")
    assert len(notes) == bool(note)
    assert note in "".join(notes)


# Published weights.
SQUEEZENET = "squeezenet1_1-b8a52dc0.pth"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def network_of_zoo(name: str) -> nn.Module:
    return models.get_model(name, **({"init_weights": False} if name in {"googlenet", "inception_v3"} else {}))


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet"])
def test_weights_on_disk_are_used_and_the_network_is_made_again_without_them(cache: Path, monkeypatch, name: str):
    monkeypatch.setattr(download.urllib.request, "urlopen", None)  # nothing may be fetched
    published = network_of_zoo(name).state_dict()
    file = cache / models.get_model_weights(name)["DEFAULT"].url.rpartition("/")[2]
    torch.save(published, file)
    whole, other = (build(name, size=64, classes=classes, pretrained=True) for classes in (1000, 7))
    assert all(torch.equal(published[key], tensor) for key, tensor in whole.state_dict().items())
    kept = [key for key, tensor in other.state_dict().items() if torch.equal(published[key], tensor)]
    assert len(kept) == len(other.state_dict()) - 2
    with torch.no_grad():
        assert other.eval()(torch.rand(2, 3, 64, 64)).shape == (2, 7)
    file.unlink()
    resolved = resolve_model(ModelOptions(name=name, pretrained=True), 64)
    again = build_model(resolved, channels=3, size=64, num_classes=7)
    assert shapes(other) == shapes(again)
    assert getattr(other, "transform_input", None) == getattr(again, "transform_input", None)
    assert not resolved.pretrained


# The weights of vit_h_14 are for other pictures; the others' last layer is none of a kind, and they are above.
@pytest.mark.parametrize("name", sorted({*ZOO} - {"googlenet", "squeezenet1_0", "squeezenet1_1", "vit_h_14"}))
def test_every_kind_has_a_head_to_replace_and_is_made_again_with_it(meta, name: str):
    model = network_of_zoo(name)
    zoo._replace_imagenet_heads(model, name, 7)
    resolved = resolve_model(ModelOptions(name=name, pretrained=True), 64)
    again = build_model(resolved, channels=3, size=picture_needs(resolved, 64).size or 64, num_classes=7)
    assert shapes(model) == shapes(again)
    assert all(1000 not in (getattr(x, "out_features", 0), getattr(x, "out_channels", 0)) for x in model.modules())
    assert [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1].out_features == 7


class Marker:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_with_code_in_the_cache_is_not_run_and_other_weights_are_refused(cache: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        write({"w": Marker(marker)}, cache / SQUEEZENET)
        with pytest.raises(UserError, match="holds more than weights"):
            build("squeezenet1_1", size=64, classes=1000, pretrained=True)
    assert not marker.exists()
    torch.save({"w": torch.ones(1)}, cache / SQUEEZENET)
    with pytest.raises(UserError, match="another network's weights"):
        build("squeezenet1_1", size=64, classes=1000, pretrained=True)
    (cache / SQUEEZENET).write_bytes(b"half a file")
    with pytest.raises(UserError, match="damaged"):
        build("squeezenet1_1", size=64, classes=1000, pretrained=True)


@pytest.mark.parametrize("fault", ["silent", "slow look-up"])
def test_without_a_network_it_says_soon_what_to_put_where(cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    """tests/data/test_download.py has a server that refuses and one that is unknown."""
    monkeypatch.setattr(download, "PATIENCE_S", 0.3)
    if fault == "slow look-up":
        monkeypatch.setattr(download, "getaddrinfo", lambda *_: time.sleep(2))
        monkeypatch.setattr(download.urllib.request, "getproxies", dict)
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/net-01234567.pth"
        with pytest.raises(UserError, match="can't be downloaded") as caught:
            zoo.fetch_weights(url)
    assert time.monotonic() - started < 5
    assert f"save the file as {cache / 'net-01234567.pth'}" in str(caught.value)
