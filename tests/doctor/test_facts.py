"""Facts are plain data, true of this machine, and fingerprints change exactly with what they stand for."""

import contextlib
import importlib.metadata
import json
import socket
import subprocess
import sys

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.doctor import facts as fact_module
from manyhands.cluster.doctor.accelerators import cards
from manyhands.cluster.doctor.facts import find_data_files, gather_facts, hash_code_files, other_jobs
from manyhands.cluster.doctor.findings import FactsWanted
from tests.e2e.command import QUICK, assert_one_screen, run

CARDS = ("accelerators", "cards", "torch_devices")
WAITING = ["-c", "import time; print(flush=True); time.sleep(100)"]


def test_facts_are_json_and_true_of_this_machine(tmp_path):
    facts = json.loads(json.dumps(gather_facts(FactsWanted(workdir=str(tmp_path), data="digits"))))
    assert facts["errors"] == {}
    assert facts["name"]["host"] == socket.gethostname()
    addresses = {a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family == socket.AF_INET}
    said = {entry["address"] for interface in facts["interfaces"] for entry in interface["addresses"]}
    assert addresses <= said
    assert facts["python"] == {"version": sys.version.split()[0], "path": sys.executable}
    assert facts["versions"]["torch"]
    assert 0 < facts["cores"] <= psutil.cpu_count()
    assert facts["data"] == {"kind": "none"}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """Puts a shell script in the place of NVIDIA's tool."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(script):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        return tool

    return put


def test_what_nvidias_tool_says_is_read_and_what_cannot_be_found_hides_no_other_fact(nvidia):
    """In the form that is asked of it: of two devices the first is in use, the second doesn't tell its load."""
    nvidia(
        "case $1 in\n--query-gpu=*) echo '0, GPU-a1, NVIDIA H200, 143771, 90001, 98'\n"
        "echo '1, GPU-b2, NVIDIA H200, 143771, 4, [N/A]';;\n*) echo 'GPU-a1, 4711, 90000, python, with a comma';;\nesac"
    )
    one, two = gather_facts(FactsWanted(only=("accelerators",)))["accelerators"]
    assert (one["name"], one["used_mib"], one["busy_percent"]) == ("NVIDIA H200", 90001, 98)
    assert one["processes"] == [{"pid": 4711, "used_mib": 90000, "name": "python, with a comma"}]
    assert (two["index"], two["busy_percent"], two["processes"]) == (1, 0, [])
    nvidia("echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18")
    facts = gather_facts(FactsWanted(only=("accelerators", "cores")))
    assert "version mismatch" in facts["errors"]["accelerators"]
    assert facts["cores"]


def test_cards_are_found_on_the_pci_bus_whether_or_not_a_driver_works(tmp_path):
    devices = {"0000:01:00.0": ("0x10de", "0x030200"), "0000:02:00.0": ("0x1002", "0x120000"),
               "0000:03:00.0": ("0x19e5", "0x120000"), "0000:00:02.0": ("0x8086", "0x030000"),
               "0000:01:00.1": ("0x10de", "0x040300"), "0000:04:00.0": ("0x1002", "0x030000")}  # fmt: skip
    for address, (vendor, kind) in devices.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(vendor + "\n")
        (tmp_path / address / "class").write_text(kind + "\n")
    (tmp_path / "0000:05:00.0").mkdir()
    assert cards(tmp_path) == [
        {"vendor": "NVIDIA", "address": "0000:01:00.0"},
        {"vendor": "AMD", "address": "0000:02:00.0"},
        {"vendor": "Huawei", "address": "0000:03:00.0"},
    ]
    assert cards(tmp_path / "none") == []


def test_torch_is_asked_only_where_there_is_a_card_and_somebody_wants_it(nvidia):
    tool = nvidia("case $1 in --query-gpu=*) echo '0, GPU-a1, NVIDIA A100, 81920, 4, 0';; esac")
    facts = gather_facts(FactsWanted(torch=True, only=CARDS))
    seen = facts["torch_devices"]
    assert set(seen) == {"count", "built_for", "version", "said"}
    assert seen["version"] == importlib.metadata.version("torch") or "+" in seen["version"]
    assert gather_facts(FactsWanted(only=CARDS))["torch_devices"] is None
    tool.unlink()
    if not cards():
        assert gather_facts(FactsWanted(torch=True, only=CARDS))["torch_devices"] is None


names = st.text("abcdef", min_size=1, max_size=4)
trees = st.dictionaries(names.map("{}.py".format), st.binary(max_size=20), min_size=1, max_size=5)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@settings(max_examples=30)
@given(trees, trees)
def test_two_folders_have_one_fingerprint_exactly_if_their_code_or_the_names_and_sizes_of_their_data_are_equal(
    tmp_path_factory, one, two
):
    folders = [write(tmp_path_factory.mktemp("code"), files) for files in (one, two)]
    assert (hash_code_files(folders[0])["hash"] == hash_code_files(folders[1])["hash"]) == (one == two)
    shapes = [{name: len(content) for name, content in files.items()} for files in (one, two)]
    prints = [find_data_files(str(folder), "", folder) for folder in folders]
    assert (prints[0]["hash"] == prints[1]["hash"]) == (shapes[0] == shapes[1])
    assert prints[0]["files"] == len(one)


def test_results_environments_and_hidden_files_are_no_code(tmp_path):
    before = hash_code_files(write(tmp_path, {"net.py": b"1"}))
    none = ("runs/a.py", ".git/b.py", "env/pyvenv.cfg", "env/c.py", "picture.png", ".d.py")
    write(tmp_path, dict.fromkeys(none, b""))
    assert hash_code_files(tmp_path) == before
    assert hash_code_files(tmp_path / "nowhere")["exists"] is False


def test_named_data_is_looked_for_where_it_would_lie(tmp_path):
    absent = {"kind": "named", "path": str(tmp_path / "mnist"), "exists": False}
    assert find_data_files("mnist", str(tmp_path), tmp_path) == absent
    write(tmp_path, {"MNIST/raw/x.gz": b"12"})
    assert find_data_files("mnist", str(tmp_path), tmp_path)["files"] == 1
    assert find_data_files("./pets", "", tmp_path)["exists"] is False
    for name in ("digits", "synthetic:9x1x4x4x2", "fake-imagenet", "data.py:pets"):
        assert find_data_files(name, "", tmp_path) == {"kind": "none"}


def test_other_jobs_are_known_by_what_they_run():
    """A process's own words are its parent's to choose, so that sleep can stand for all."""
    jobs, others = (["torchrun"], ["python", "-m", "deepspeed"]), (["ssh", "n2", "torchrun"], ["vim", "on_torchrun.py"])
    with contextlib.ExitStack() as stack:
        started = []
        for first, *rest in (*jobs, *others):
            program = f"import os; os.execv({sys.executable!r}, {[first, *WAITING, *rest]!r})"
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
            assert process.stdout.readline() == b"\n"
        found = {job["pid"] for job in other_jobs()}
    assert [process.pid in found for process in started] == [True, True, False, False]


def test_a_torchvision_made_for_another_torch_is_found_and_is_one_screen(tmp_path, monkeypatch):
    """Tried by its import, and that alone where what it asks for isn't there; what can be imported is used."""
    package, told = tmp_path / "torchvision", tmp_path / "torchvision-0.1.0.dist-info"
    package.mkdir()
    told.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\nRequires-Dist: torch==2.1.0\n"
    (told / "METADATA").write_text(metadata)
    said = ("torchvision 0.1.0 is for torch 2.1.0", "operator torchvision::nms does not exist")
    trained = run("train", "digits", "mlp", *QUICK, "--set", "train.compile=true", cwd=tmp_path,
                  PYTHONPATH=str(tmp_path))  # fmt: skip
    assert trained.code
    assert_one_screen(trained.err)
    assert all(words in trained.err for words in said), trained.err
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = gather_facts(FactsWanted(only=("torchvision",)))["torchvision"]
    assert all(words in found for words in said), found
    (package / "__init__.py").write_text("")
    assert gather_facts(FactsWanted(only=("torchvision",)))["torchvision"] == ""


def test_a_torchvision_of_another_build_is_tried_and_none_is_needed(tmp_path, monkeypatch):
    """Its version and the torch that it asks for are right."""
    of = {"torch": "2.15.0+cpu", "torchvision": "0.30.0"}
    monkeypatch.setattr(fact_module.metadata, "version", lambda name: of.get(name, "1.0"))
    monkeypatch.setattr(fact_module.metadata, "requires", lambda _name: ["torch==2.15.0"])
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = "torchvision 0.30.0 is a different build and can't be imported with torch 2.15.0+cpu"
    assert said in fact_module.torchvision_import_error()
    of["torch"] = "2.15.0"
    assert fact_module.torchvision_import_error() == ""

    def version(name):
        if name == "torch":
            return "2.15.0+cpu"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fact_module.metadata, "version", version)
    assert fact_module.torchvision_import_error() == ""
