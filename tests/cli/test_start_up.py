"""What must stay light, and flags: each sets an option that exists."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.flags import Key
from manyhands.cli.main import COMMANDS, GROUPS, main, make_app
from manyhands.config.load import known_keys
from tests.e2e.command import done, inside

LIGHT = (
    "explain -n 2", "train --show-config", "ps --json", "stop no-such-run", "logs no-such-run", "clean",
    "pack no-such-folder", "imagenet --show-config", "launch digits --hosts away.invalid", "train digts --dry-run",
    "launch digits renset18 --hosts localhost", "plan digts", "doctor",
)  # fmt: skip
MODULES = (
    "manyhands", "manyhands.run.train", "manyhands.run.disk", "manyhands.report.page",
    "manyhands.cluster.doctor.probe", "manyhands.cluster.hosts.this_process", "manyhands.cluster.agents.machines",
    "manyhands.cluster.agents.supervise",
)  # fmt: skip
MISSING = {
    "train nowhere/pets mlp": "there is no folder nowhere/pets",
    "train data.csv mlp": "data.csv is a file",
    "train d.yaml": "d.yaml is a YAML file",
    "train digits net.py:Net": "there is no file net.py",
    "train data.py:make mlp": "there is no file data.py",
    "train digits net.py:Net --dry-run": "there is no file net.py",
    "train digits mlp --model.weights weights.pth": "there is no weights.pth",
    "train digits mlp --device gpu": "there is no device type gpu",
    "train digts mlp": 'no data set is called "digts"',
    "train digits renset18": 'no network is called "renset18"',
    "train digits cifar:renset18": 'no network is called "cifar:renset18"',
    "train digits mlp --parallel dta": 'no parallel mode is called "dta"',
    "train digits mlp --sync alreduce": 'no sync method is called "alreduce"',
    "train digits -n 0": '"0"',
    "train digits mlp --pretrained": "mlp has no published weights",
    "train digits mlp --mesh tp=3 -n 2": "the mesh tp=3 is for 3 processes, but the run has 2",
}
WITHOUT_TORCH = f"""
import contextlib, importlib, io, sys
from manyhands.cli.main import main
for name in {MODULES}:
    importlib.import_module(name)
    assert not {{"torch", "matplotlib"}} & {{*sys.modules}}, name
missing = {MISSING}
for line in (*missing, *{LIGHT}):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(line.split())
        except SystemExit as ended:
            assert line not in missing or (ended.code == 2 and missing[line] in said.getvalue()), said.getvalue()
        else:
            assert line not in missing, line
    assert not {{"torch", "matplotlib"}} & {{*sys.modules}}, line
"""


def python(*words, **options):
    """Runs a Python of its own to its end."""
    return subprocess.run([sys.executable, *words], **{"capture_output": True, **options}, text=True, check=False)


def test_commands_import_no_torch_unless_they_train_and_find_what_is_missing_before(tmp_path):
    for name in ("data.csv", "d.yaml"):
        (tmp_path / name).touch()
    done = python("-c", WITHOUT_TORCH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_command_that_imports_torch_ends_without_a_word_of_others():
    done = python("-m", "manyhands", "train", "digits", "mlp", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")


# Ctrl-C comes in the midst of the command's own imports.
INTERRUPTED = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "cyclopts":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
runpy.run_module("manyhands", run_name="__main__")
"""


def test_ctrl_c_before_anything_has_begun_ends_without_a_word():
    done = python("-c", INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_little_is_imported_before_ctrl_c_is_handled():
    """What is imported by then, a traceback tells of if Ctrl-C comes in its midst."""
    code = "import sys; before = set(sys.modules); import manyhands.__main__; print(*sorted({*sys.modules} - before))"
    done = python("-c", code)
    own = {"manyhands", "manyhands.__main__"}
    assert set(done.stdout.split()) <= own, done.stderr


def test_help_groups_all_commands_and_begins_with_those_of_the_first_day(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    listed = [line.split()[1] for line in shown.splitlines() if line.startswith("│ ") and line[2] != " "]
    assert listed[:-2] == list(COMMANDS)
    assert listed[:5] == ["train", "eval", "predict", "resume", "report"]
    titles = [line.strip(" ─╭╮") for line in shown.splitlines() if line.startswith("╭")]
    assert titles == [*GROUPS.values(), "Options"]


def test_what_could_not_be_written_is_a_failure():
    with Path("/dev/full").open("w") as full:
        pipes = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        done = python("-m", "manyhands", "train", "--show-config", **pipes)
    assert done.returncode == 1
    assert done.stderr.startswith("manyhands: the output can't be written: No space left on device\n")


# Prints each command whose page of help brings along a package that only work needs.
HELP = """
import contextlib, importlib.metadata, io, re, sys
from manyhands.cli.main import COMMANDS, main
from manyhands.cli.files import checkpoint

needed = {re.match(r"[\\w-]+", line)[0] for line in importlib.metadata.requires("manyhands")} - {"cyclopts", "rich"}
owners = importlib.metadata.packages_distributions().items()
modules = {name for name, packages in owners if needed & {one.lower().replace("_", "-") for one in packages}}
assert {"torch", "pydantic", "yaml", "PIL", "tomli_w"} <= modules
pages = [[], *([name] for name in COMMANDS), *(["checkpoint", name] for name in checkpoint if name[0] != "-")]
for page in pages:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*page, "--help"])
    assert "Usage: manyhands" in text.getvalue(), page
    if found := modules & {*sys.modules}:
        print(page, found)
        modules -= found
"""


def test_help_needs_no_package_but_those_that_print_it():
    done = python("-c", HELP)
    assert (done.stdout, done.stderr) == ("", "")


NEEDED = {"logs": ["run"], "eval": ["run"], "predict": ["run", "a.png"], "resume": ["run"], "pack": ["folder"]}
APP = make_app()
ARGUMENTS = [
    (name, each) for name in COMMANDS if name != "checkpoint" for each in APP[name].assemble_argument_collection()
]
WHOLE = [(command, each.name) for command, each in ARGUMENTS if re.search(r"\bint\b", str(each.field_info.annotation))]


@pytest.mark.parametrize("words", ["train digits", "launch digits --hosts n1,n2", "imagenet"])
def test_sync_is_a_flag(words):
    shown = done(words, "--sync powersgd --show-config", by=inside).out
    assert re.search(r'\[sync\]\nmethod = "powersgd".*flag', shown), shown


def test_fraction_is_refused_if_an_integer_is_expected(capsys):
    assert {("train", "--epochs"), ("resume", "--epochs"), ("imagenet", "-b"), ("logs", "--last")} <= {*WHOLE}
    for command, flag in WHOLE:
        with pytest.raises(SystemExit) as ended:
            main([command, *NEEDED.get(command, []), flag, "1.5"])
        assert ended.value.code == 2
        assert '"1.5" is not a whole number' in capsys.readouterr().err, (command, flag)


def test_every_flag_that_sets_an_option_sets_one_that_exists():
    metadata = [
        each for _, argument in ARGUMENTS for each in getattr(argument.field_info.annotation, "__metadata__", ())
    ]
    keys = {each for each in metadata if isinstance(each, Key)}
    assert len(keys) > 30
    assert keys <= {*known_keys()}
