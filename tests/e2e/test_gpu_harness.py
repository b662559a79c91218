"""What proves things on an accelerator, proven itself: on a processor, and on parts that fail or hang."""

import getpass
import importlib.metadata
import inspect
import json
import os
import re
import socket
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from scripts.gpu_wheels import NAMES, pinned

from tests.docs.test_examples import ROOT
from tests.gpu import __main__ as harness
from tests.gpu import cases
from tests.gpu.result import ResultFile, nameless

PLANTED = """
import json, os, sys, time
name, device, answer, limit_s = sys.argv[1:]
print("begun in", os.getcwd(), flush=True)
if name == "hangs":
    time.sleep(60)
if name == "fails":
    raise RuntimeError(f"nothing at {os.getcwd()}/here")
with open(answer, "w") as stream:
    json.dump({"figures": {"device": device}} if name == "holds" else {"said": "needs a card"}, stream)
sys.exit({"holds": 0, "can't": 3, "needs two": 4}[name])
"""


@pytest.mark.slow
def test_each_part_ends_by_itself_and_says_how(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    wanted = {"holds": "proven", "fails": "failed", "hangs": "timed out", "can't": "skipped", "needs two": "unproven"}
    result = ResultFile(tmp_path / "out.json", "gpu-test", "cpu", {"torch": "2.11.0"})
    for name, status in wanted.items():
        got, seconds, found = harness.run_part("planted", name, "cpu", variables, 3.0 if name == "hangs" else 120.0)
        assert got == status, (name, found)
        result.add(name, got, seconds, **found)
        reported = json.loads((tmp_path / "out.json").read_text())
        assert not reported["complete"]
        assert [part["name"] for part in reported["parts"]] == list(wanted)[: len(reported["parts"])]
    text = (tmp_path / "out.json").read_text()
    assert "RuntimeError: nothing at …/here" in text
    assert str(tmp_path) not in text


def test_a_result_names_nobody():
    who = f"{getpass.getuser()} on {socket.gethostname()}"
    reported = nameless(f"{who} at 10.1.2.33 and fe80:0:0:0:1:2:3:4: /home/someone/a/b.py, line 7")
    assert reported == "USER on HOST at ADDRESS and ADDRESS: …/b.py, line 7"
    assert nameless("x" * 7000) == f"… {'x' * 6000}"
    assert nameless("1/2 of 3/4, torch 2.11.0") == "1/2 of 3/4, torch 2.11.0"


def test_every_part_has_a_limit():
    functions = {name: one for name, one in inspect.getmembers(cases, inspect.isfunction) if name[0] != "_"}
    takes = {name for name, one in functions.items() if [*inspect.signature(one).parameters][:1] == ["device"]}
    assert takes == set(harness.LIMITS)


def test_the_wheels_are_all_that_is_needed_beside_torch():
    theirs, needed, todo = {"torch", "torchvision", "numpy", "pillow"}, set(), ["manyhands"]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in theirs | needed:
            continue
        needed.add(name)
        wanted = [Requirement(one) for one in importlib.metadata.requires(name) or []]
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    needed.remove("manyhands")
    assert needed <= set(NAMES), needed - set(NAMES)
    assert len(pinned(ROOT / "constraints.txt")) == len(NAMES)


@pytest.mark.slow
def test_cases_are_imported_without_pytest():
    hidden = "import sys; sys.modules['pytest'] = None; import tests.gpu.cases"
    subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parts_hold_on_a_processor(tmp_path):
    names = ["out_of_memory_says_what_fits", "fp16_skips_alike_and_goes_on", "a_bad_gradient_spoils_no_weight",
             "goes_on_to_the_same_bits", "two_cards_share_parameters"]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--wheels", str(tmp_path / "none"), "--patience", "8",
         "--seconds", "560", "--out", str(tmp_path / "out.json"), *names],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    reported = json.loads((tmp_path / "out.json").read_text())
    assert ran.returncode == 0, reported
    assert reported["complete"]
    statuses = {part["name"]: part["status"] for part in reported["parts"]}
    assert statuses.pop("out_of_memory_says_what_fits") == "skipped"
    assert statuses.pop("two_cards_share_parameters") == "unproven"
    assert set(statuses.values()) == {"proven"}, reported
