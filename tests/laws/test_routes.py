"""The routes that ARCHITECTURE.md draws are those of a real run, hop by hop; so a route that grows is seen."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "manyhands"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
HOP = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
# Python imports it at its start, in every process; it writes down the own frames that are open where a route ends.
RECORDER = """
import json, os, sys, threading

PACKAGE, FOUND = os.environ["MANYHANDS_SRC"] + "/", os.environ["MANYHANDS_HOPS"]
ENDS = {
    "supervise_once": "cluster/agents/supervise.py", "_start_workers": "cluster/agents/elastic.py",
    "fit": "train/loop.py", "batches": "data/order.py", "__call__": "data/transforms.py",
    "begin": "train/background.py", "write_stream": "checkpoint/stream.py", "commit": "checkpoint/commit.py",
}
written = set()


def own(frame):
    found = []
    while frame:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            found.append(f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname.replace('.<locals>', '')}")
        frame = frame.f_back
    return found[::-1]


def look(frame, event, _argument):
    code = frame.f_code
    name, file = code.co_name, code.co_filename
    forward = name == "forward" and file.endswith("/torch/nn/modules/linear.py")
    if not forward and (name not in ENDS or file != PACKAGE + ENDS[name]):
        return
    stack = own(frame)
    trains = any(hop.startswith(("train/loop.py", "train/background.py")) for hop in stack)
    if (os.getpid(), name) in written or not (trains or name in {"supervise_once", "_start_workers"}):
        return
    written.add((os.getpid(), name))
    with open(FOUND, "a") as out:
        out.write(json.dumps([name, stack]) + "\\n")


sys.settrace(look)
threading.settrace(look)
"""


def drawn(route):
    """The hops of a route as the page draws it."""
    (line,) = re.findall(rf"^- \*\*{re.escape(route)}\*\*.*(?:\n  .*)*", PAGE, re.MULTILINE)
    return [": ".join(hop) for hop in HOP.findall(line)]


def record(folder, *words):
    """The stacks at the ends of routes in a real run; the first of each end."""
    (folder / "sitecustomize.py").write_text(RECORDER)
    found = folder / "hops"
    environment = {
        **os.environ, "PYTHONPATH": str(folder), "MANYHANDS_SRC": str(PACKAGE), "MANYHANDS_HOPS": str(found),
    }  # fmt: skip
    command = [sys.executable, "-c", "from manyhands.cli.main import main; main()", *words, "--device", "cpu"]
    quick = ["--epochs", "1", "--batch", "1024", "--set", "run.report=false", "--out", "run"]
    ended = subprocess.run(
        [*command, *quick], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert not ended.returncode, ended.stderr
    stacks = {}
    for line in found.read_text().splitlines():
        name, stack = json.loads(line)
        stacks.setdefault(name, stack)
    return stacks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return record(tmp_path_factory.mktemp("trained"), "train", "digits", "mlp", "-n", "2")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return record(tmp_path_factory.mktemp("launched"), "launch", "digits", "mlp", "--hosts", "localhost:2")


def processes(stacks):
    """The hops in each process; a worker is forked within its agent's frames."""
    agent = stacks["_start_workers"]
    assert stacks["fit"][: len(agent)] == agent
    return {"head": stacks["supervise_once"], "agent": agent, "worker": stacks["fit"][len(agent) :]}


@pytest.mark.parametrize("command", ["command", pytest.param("launch", marks=pytest.mark.slow)])
def test_a_command_comes_to_the_training_loop_as_drawn_in_at_most_twelve_frames(command, request):
    measured = processes(request.getfixturevalue("trained" if command == "command" else "launched"))
    assert {process: drawn(f"{command}, {process}") for process in measured} == measured
    assert sum(map(len, measured.values())) <= 12


def test_a_batch_passes_the_drawn_files_and_at_most_eight(trained):
    files = set()
    for route, end in (("order", "batches"), ("pixels", "__call__"), ("forward", "forward")):
        begun = trained[end].index("train/loop.py: fit")
        assert drawn(f"batch, {route}") == trained[end][begun:]
        files |= {hop.partition(":")[0] for hop in trained[end][begun:]}
    assert len(files) <= 8


def test_a_checkpoint_comes_to_the_disk_as_drawn(trained):
    begun = trained["begin"].index("train/loop.py: fit")
    assert drawn("checkpoint, copy") == trained["begin"][begun:]
    for route, end in (("bytes", "write_stream"), ("commit", "commit")):
        assert drawn(f"checkpoint, {route}") == trained[end]


@pytest.mark.parametrize(("file", "name"), sorted(set(HOP.findall(PAGE))))
def test_what_the_page_names_is_there(file, name):
    tree = ast.parse((PACKAGE / file).read_text())
    for part in name.split("."):
        (tree,) = [
            node for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part and node is not tree
        ][:1]  # fmt: skip
