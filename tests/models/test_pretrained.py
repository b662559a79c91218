import functools
import hashlib
import http.server
import pickle
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
from manyhands.models.build import build_model, describe, resolve_model
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


def test_weights_on_disk_are_used(cache: Path):
    published = models.squeezenet1_1()
    torch.save(published.state_dict(), cache / SQUEEZENET)
    whole, other = build("squeezenet1_1"), build("squeezenet1_1", 7)
    for name, tensor in published.state_dict().items():
        assert torch.equal(whole.state_dict()[name], tensor)
        if not name.startswith("classifier"):
            assert torch.equal(other.state_dict()[name], tensor)
    assert other(torch.rand(2, 3, 64, 64)).shape == (2, 7)


KINDS = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "swin_t", "swin_v2_t", "vgg11", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_a_head_to_replace(meta, name: str):
    model = network_of_zoo(name)
    zoo._replace_heads(model, name, 7)
    assert all(1000 not in (getattr(x, "out_features", 0), getattr(x, "out_channels", 0)) for x in model.modules())
    assert [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1].out_features == 7


class Marker:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_with_code_in_the_cache_is_not_run(cache: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    for write in (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))):
        write({"w": Marker(marker)}, cache / SQUEEZENET)
        with pytest.raises(UserError, match="holds more than weights"):
            build("squeezenet1_1")
    assert not marker.exists()


def test_damaged_and_foreign_weights_are_refused(cache: Path):
    torch.save({"w": torch.ones(1)}, cache / SQUEEZENET)
    with pytest.raises(UserError, match="another network's weights"):
        build("squeezenet1_1")
    (cache / SQUEEZENET).write_bytes(b"half a file")
    with pytest.raises(UserError, match="damaged"):
        build("squeezenet1_1")


@pytest.fixture
def server(tmp_path: Path):
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_weights_are_downloaded_once_and_checked(cache: Path, server: tuple[Path, str]):
    folder, address = server
    torch.save({"w": torch.arange(3)}, folder / "new.pth")
    name = f"net-{hashlib.sha256((folder / 'new.pth').read_bytes()).hexdigest()[:8]}.pth"
    (folder / "new.pth").rename(folder / name)
    path = zoo.fetch_weights(f"{address}/{name}")
    assert path == cache / name
    (folder / name).unlink()
    assert zoo.fetch_weights(f"{address}/{name}") == path


def test_a_download_that_is_wrong_is_not_kept(cache: Path, server: tuple[Path, str]):
    folder, address = server
    torch.save({"w": torch.arange(3)}, folder / "net-01234567.pth")
    with pytest.raises(UserError, match="SHA-256"):
        zoo.fetch_weights(f"{address}/net-01234567.pth")
    with pytest.raises(UserError, match="File not found"):
        zoo.fetch_weights(f"{address}/other.pth")
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("fault", ["refused", "silent", "unknown host", "slow look-up"])
def test_without_a_network_it_says_soon_what_to_put_where(cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    monkeypatch.setattr(download, "PATIENCE_S", 0.5)
    monkeypatch.delenv("https_proxy", raising=False)

    def look_up(host, port, *arguments, **options):
        if fault == "slow look-up":
            time.sleep(2)
        raise socket.gaierror("Name or service not known")

    started = time.monotonic()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if fault == "silent":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/net-01234567.pth"
        if fault in ("unknown host", "slow look-up"):
            monkeypatch.setattr(download, "getaddrinfo", look_up)
            monkeypatch.setattr(download.urllib.request, "getproxies", dict)
        with pytest.raises(UserError, match="can't be downloaded") as caught:
            zoo.fetch_weights(url)
    assert time.monotonic() - started < 5
    assert f"save the file as {cache / 'net-01234567.pth'}" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "googlenet", "inception_v3", "vit_b_32", "maxvit_t", "resnet18", "squeezenet1_1",
    ],
)  # fmt: skip
def test_heads_are_replaced_and_the_network_is_made_again_without_the_published_weights(cache: Path, monkeypatch, name):
    monkeypatch.setattr(download.urllib.request, "urlopen", None)  # nothing may be fetched for the second one
    weights = network_of_zoo(name).state_dict()
    file = cache / models.get_model_weights(name)["DEFAULT"].url.rpartition("/")[2]
    torch.save(weights, file)
    asked = ModelOptions(name=name, pretrained=True)
    size = describe(asked, 64).size or 64
    first, settled = build(name, 7, size), resolve_model(asked, 64)
    file.unlink()
    again = build_model(settled, channels=3, size=describe(settled, 64).size or 64, num_classes=7)
    assert {k: v.shape for k, v in first.state_dict().items()} == {k: v.shape for k, v in again.state_dict().items()}
    assert getattr(first, "transform_input", None) == getattr(again, "transform_input", None)
    assert not settled.pretrained
    with torch.no_grad():
        assert first.eval()(torch.rand(2, 3, size, size)).shape == (2, 7)
