import base64
import dataclasses
import functools
import hashlib
import http.server
import multiprocessing
import threading
import time

import pytest
import torch
from tests.data.sets import write_mnist

from manyhands.core.download import download
from manyhands.core.errors import UserError
from manyhands.core.files import locked
from manyhands.data import known
from manyhands.data.datasets.published import fetch
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions
from manyhands.models.architectures.torchvision import fetch_weights

CONTENT = bytes(range(256)) * 5000
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server on loopback that remembers what it is asked for and by whom; `folder` is what it serves."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            serving.asked.append(self.path)
            serving.heard.append(self.headers.get("Authorization"))
            if self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{serving.server_port}/mnist/x.gz")
                self.end_headers()
            elif self.headers.get("Authorization", "") != serving.wanted:
                self.send_error(401)
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    folder = tmp_path / "served"
    (folder / "mnist").mkdir(parents=True)
    (folder / "mnist" / "x.gz").write_bytes(CONTENT)
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        serving.asked, serving.heard, serving.folder, serving.wanted = [], [], folder, ""
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        monkeypatch.setenv("MANYHANDS_MIRROR", f"http://127.0.0.1:{serving.server_port}/")
        yield serving
        serving.shutdown()


def test_a_wrong_checksum_leaves_nothing_and_a_later_run_tries_again(server, tmp_path):
    into = tmp_path / "data" / "x.gz"
    with pytest.raises(UserError, match=r"mnist/x\.gz can't be downloaded") as caught:
        fetch("mnist/x.gz", (), "0" * 32, into)
    text = str(caught.value)
    assert f"the MD5 checksum of the download is {MD5}" in text
    assert f"download x.gz by hand into {into.parent}" in text
    assert not into.exists()
    assert not list(into.parent.glob("*.part"))
    for _ in range(2):
        assert fetch("mnist/x.gz", (), MD5, into).read_bytes() == CONTENT
    assert server.asked == ["/mnist/x.gz"] * 2
    assert {path.name for path in into.parent.iterdir() if not path.name.endswith(".lock")} == {"x.gz"}


def test_published_weights_are_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    wrong = server.folder / "net-01234567.pth"
    torch.save({"w": torch.arange(3)}, wrong)
    right = wrong.with_name(f"net-{hashlib.sha256(wrong.read_bytes()).hexdigest()[:8]}.pth")
    right.write_bytes(wrong.read_bytes())
    address = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(UserError, match="SHA-256"):
        fetch_weights(f"{address}/{wrong.name}")
    for _ in range(2):
        assert fetch_weights(f"{address}/{right.name}").read_bytes() == right.read_bytes()
    assert server.asked == [f"/{wrong.name}", f"/{right.name}"]
    assert [path.name for path in tmp_path.joinpath("home").rglob("*.pth*") if path.suffix != ".lock"] == [right.name]


def test_missing_file_and_dead_server_are_reported(server, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="File not found"):
        fetch("mnist/none.gz", (), MD5, tmp_path / "none.gz")
    monkeypatch.delenv("MANYHANDS_MIRROR")
    urls = ("http://127.0.0.1:9/x", "http://name.invalid/x")
    with pytest.raises(UserError) as caught:
        fetch("mnist/x.gz", urls, MD5, tmp_path / "x.gz")
    assert all(url in str(caught.value) for url in urls)
    assert "unknown url type" in download("//localhost/x", tmp_path / "x", None)


def test_a_mirror_with_a_password_works_and_its_password_is_nowhere(server, tmp_path, monkeypatch):
    into = tmp_path / "data" / "x.gz"
    server.wanted = f"Basic {base64.b64encode(b'anna:s3cr:t/word').decode()}"
    monkeypatch.setenv("MANYHANDS_MIRROR", f"http://anna:s3cr%3At%2Fword@127.0.0.1:{server.server_port}/")
    assert fetch("mnist/x.gz", (), MD5, into).read_bytes() == CONTENT
    into.unlink()
    for mirror in (
        "anna:wr0ngword@127.0.0.1:PORT",
        "anna:wr0ngword/x@127.0.0.1:PORT",
        "anna:wr0ngword@[::1",
        "anna:wr0ng@word@127.0.0.1:PORT",
    ):
        monkeypatch.setenv("MANYHANDS_MIRROR", f"http://{mirror}/".replace("PORT", str(server.server_port)))
        with pytest.raises(UserError, match="can't be downloaded") as caught:
            fetch("mnist/x.gz", (), MD5, into)
        kept = "".join(path.read_text() for path in into.parent.iterdir() if path.is_file())
        assert "wr0ng" not in str(caught.value) + kept
        assert "anna" not in str(caught.value)


def test_a_password_is_for_its_own_server(server, tmp_path):
    """A mirror may answer with another server's address; that one learns nothing."""
    assert not download(f"http://anna:word@127.0.0.1:{server.server_port}/elsewhere", tmp_path / "x", None)
    assert server.heard == [f"Basic {base64.b64encode(b'anna:word').decode()}", None]


def _fetch_in_process(into, md5, results):
    try:
        results.put(fetch("mnist/x.gz", (), md5, into).read_bytes() == CONTENT)
    except UserError:
        results.put("refused")


@pytest.mark.parametrize("md5", [MD5, "0" * 32])
def test_processes_of_a_host_ask_once(server, tmp_path, md5):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    into = tmp_path / "data" / "x.gz"
    processes = [context.Process(target=_fetch_in_process, args=(into, md5, results)) for _ in range(4)]
    (tmp_path / "data").mkdir()
    with locked(into):
        for process in processes:
            process.start()
        time.sleep(0.3)  # all four wait for the lock
    for process in processes:
        process.join(30)
    assert [results.get() for _ in processes] == [True if md5 == MD5 else "refused"] * 4
    assert server.asked == ["/mnist/x.gz"]


def test_a_named_set_is_fetched_into_its_folder(server, tmp_path, monkeypatch):
    checksums = [
        (path.name, hashlib.md5(path.read_bytes()).hexdigest())
        for path in sorted(write_mnist(server.folder / "mnist", (4, 2)).glob("*-ubyte.gz"), reverse=True)
    ]
    monkeypatch.setitem(known.KNOWN, "mnist", dataclasses.replace(known.KNOWN["mnist"], md5=tuple(checksums)))
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path / "data"))
    splits = open_data(DataOptions(name="mnist"))
    assert (len(splits.train), len(splits.test)) == (4, 2)
    assert len(server.asked) == 4
    open_data(DataOptions(name="mnist", download=False))
    with pytest.raises(UserError, match=r"has no train-images-idx3-ubyte\.gz"):
        open_data(DataOptions(name="fashion-mnist", download=False))
