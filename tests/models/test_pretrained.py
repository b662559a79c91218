import functools
import hashlib
import http.server
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from manyhands.core import download
from manyhands.core.errors import UserError
from manyhands.models.architectures import torchvision as zoo
from manyhands.models.build import build_model, picture_needs, resolve_model
from manyhands.models.options import ModelOptions

SQUEEZENET = "squeezenet1_1-b8a52dc0.pth"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def build(name: str, num_classes: int = 1000, size: int = 64) -> nn.Module:
    return build_model(ModelOptions(name=name, pretrained=True), channels=3, size=size, num_classes=num_classes)


def network_of_zoo(name: str) -> nn.Module:
    return models.get_model(name, **({"init_weights": False} if name in {"googlenet", "inception_v3"} else {}))


KINDS = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "swin_t", "swin_v2_t", "vgg11", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet"])
def test_weights_on_disk_are_used_and_the_network_is_made_again_without_them(cache: Path, monkeypatch, name: str):
    monkeypatch.setattr(download.urllib.request, "urlopen", None)  # nothing may be fetched
    published = network_of_zoo(name).state_dict()
    file = cache / models.get_model_weights(name)["DEFAULT"].url.rpartition("/")[2]
    torch.save(published, file)
    whole, other = build(name), build(name, 7)
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


@pytest.mark.parametrize("name", KINDS)
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
            build("squeezenet1_1")
    assert not marker.exists()
    torch.save({"w": torch.ones(1)}, cache / SQUEEZENET)
    with pytest.raises(UserError, match="another network's weights"):
        build("squeezenet1_1")
    (cache / SQUEEZENET).write_bytes(b"half a file")
    with pytest.raises(UserError, match="damaged"):
        build("squeezenet1_1")


def test_weights_are_downloaded_once_and_checked(cache: Path, tmp_path: Path):
    folder = tmp_path / "served"
    folder.mkdir()
    torch.save({"w": torch.arange(3)}, folder / "net-01234567.pth")
    name = f"net-{hashlib.sha256((folder / 'net-01234567.pth').read_bytes()).hexdigest()[:8]}.pth"
    shutil.copy(folder / "net-01234567.pth", folder / name)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{serving.server_port}"
        with pytest.raises(UserError, match="SHA-256"):
            zoo.fetch_weights(f"{address}/net-01234567.pth")
        assert zoo.fetch_weights(f"{address}/{name}") == cache / name
        serving.shutdown()
    assert zoo.fetch_weights(f"{address}/{name}") == cache / name
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == [name]


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
