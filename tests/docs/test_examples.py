"""The documents are true: examples run, commands parse, both languages hold the same ones; figures are the code's.

A block after `<!-- file: NAME -->` is written to that file; one after `<!-- test -->` is run, line by line. After
`<!-- test: slow -->` it belongs to the slow tests, after `<!-- test: slow together -->` its lines run at the same time.
The Chinese pages hold the same blocks but for comments, so
that the English ones are run alone.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli.main import main, make_app
from manyhands.config.load import load_job
from manyhands.parallel.options import ParallelOptions
from tests.docs.pages import ROOT, all_pages, blocks, chinese_of, commands, english_pages, links, table_commands
from tests.fork_server import fork_variables

SECONDS = 250
RECIPES = ROOT / "docs" / "guides" / "recipes.md"
MODES = ROOT / "docs" / "guides" / "several-processes.md"
# What stands for data that has no name of its own.
EXAMPLES = {"file.py": "data.py:make", "fit(…)": "objects", "图": "./pictures", "a": "./pictures"}


def _name(page):
    return str(page.relative_to(ROOT))


def _pages_with(mark):
    return [page for page in english_pages() if any(block.mark.startswith(mark) for block in blocks(page))]


def _soon_or_slow(page):
    """The README's examples belong to the fast tests; those of all guides together take a minute."""
    return pytest.param(page, id=_name(page), marks=[] if page.parent == ROOT else pytest.mark.slow)


@pytest.mark.parametrize("page", [_soon_or_slow(page) for page in _pages_with("test")])
def test_examples_run(page, tmp_path):
    _run_marked(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("page", _pages_with("test: slow"), ids=_name)
def test_slow_examples_run(page, tmp_path):
    _run_marked(page, tmp_path, slow=True)


def _run_marked(page, folder, *, slow):
    for block in blocks(page):
        kind, _, words = block.mark.partition(": ")
        if kind == "file":
            (folder / words).write_text(block.text, encoding="utf-8")
        elif kind == "test" and ("slow" in words) == slow:
            _run(block.lines, folder, {} if page.parent == ROOT else fork_variables(), together="together" in words)


def _run(lines, folder, variables, *, together):
    """Runs shell lines as a reader would, with this Python's own programs; the guides' commands are forks."""
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        **variables,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "MANYHANDS_CLUSTER__DEVICE": "cpu",
        "MANYHANDS_RUN__REPORT": "false",  # its pictures take a second each time; fit.py draws one
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    waiting = []
    for number, line in enumerate(lines):
        with (folder / f"output-{number}").open("w+b") as output:
            process = subprocess.Popen(
                ["bash", "-c", line], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            waiting.append((line, process, Path(output.name)))
        if not together:
            _finish(waiting)
    _finish(waiting)


def _finish(waiting):
    try:
        for line, process, output in waiting:
            code = process.wait(SECONDS)
            assert code == 0, f"{line}\nended with {code}:\n{output.read_text(errors='replace')}"
    finally:
        for _, process, _ in waiting:
            process.kill()
            process.wait()
    waiting.clear()


@pytest.mark.parametrize("page", english_pages(), ids=_name)
def test_both_languages_hold_the_same_commands(page):
    def typed(path):
        return [(b.mark, b.language, b.lines) for b in blocks(path) if b.language]

    assert typed(page) == typed(chinese_of(page))
    assert table_commands(page) == table_commands(chinese_of(page))


@pytest.mark.parametrize("page", all_pages(), ids=_name)
def test_every_command_parses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.mark == "file: job.toml":
            Path("job.toml").write_text(block.text, encoding="utf-8")
    for command in commands(page):
        _parse(shlex.split(command.replace("$PWD", str(tmp_path))))


def _parse(arguments):
    """`train` and `imagenet` go as far as their configuration; of the others the flags and their number are checked."""
    if arguments[0] not in {"train", "imagenet"}:
        make_app().parse_args(arguments, exit_on_error=False, print_error=False)
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments if "--show-config" in arguments else [arguments[0], "--show-config", *arguments[1:]])
    assert ended.value.code == 0


@pytest.mark.parametrize("page", all_pages(), ids=_name)
def test_links_lead_somewhere(page):
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", all_pages(), ids=_name)
def test_python_blocks_are_python(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, _name(page), "exec")


def test_the_reference_is_up_to_date():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import build_reference
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    for path, text in build_reference.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run scripts/build_reference.py: {path} is out of date"


def rows(page):
    """The cells of the first table whose third column is a number."""
    lines = [line.strip("|").split("|") for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if len(row) == 7 and row[2].isdecimal()]


def data_of(cell):
    known = re.match(r"`([\w-]+)`$", cell)
    return known[1] if known else next(data for word, data in EXAMPLES.items() if cell.strip("`").startswith(word))


@pytest.mark.parametrize("page", [RECIPES, chinese_of(RECIPES)], ids=["en", "zh"])
def test_the_recipes_are_those_of_the_table(page):
    found = rows(page)
    assert len(found) == 11
    for data, network, epochs, batch, rate, schedule, augmentation in found:
        name = network.strip("`") if network.startswith("`") else ""
        job = load_job({"data.name": data_of(data), "model.name": name or None}, environment={}).job
        # The network is the recipe's own, where it has one; with several of them any may be named.
        alone = load_job({"data.name": data_of(data)}, environment={}).job
        assert not name or name in {alone.model.name, "mlp", "cnn"}, data
        assert (job.train.epochs, job.train.batch, job.train.lr) == (int(epochs), int(batch), float(rate)), data
        assert schedule.startswith(job.train.schedule), data
        assert bool(job.train.warmup_epochs) == ("1" in schedule), data
        assert augmentation in {"none", "无"} or job.data.augment != "none", data


@pytest.mark.parametrize("page", [MODES, chinese_of(MODES)], ids=["en", "zh"])
def test_the_default_mode_is_named(page):
    mode = ParallelOptions().mode
    assert re.search(rf"`{mode}` is the default|默认是 `{mode}`", page.read_text(encoding="utf-8"))


def test_each_fault_has_tests_and_they_exist():
    listed = (ROOT / "docs/experiments/faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", listed, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 31))
    for number, cell in rows:
        tests = re.findall(r"`([^`]+)`", cell)
        assert tests, number
        for path, _, name in (test.partition("::") for test in tests):
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not name or name.partition("[")[0] in defined, f"row {number}: {path}::{name}"


def _texts_of_the_source():
    """Every string of the package, with an ellipsis for each value (or several values in a row)."""
    texts = set()
    for path in (ROOT / "src/manyhands").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.add(re.sub("…+", "…", "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def test_the_messages_that_the_chinese_page_explains_are_those_of_the_source():
    page = (ROOT / "docs/zh/guides/messages.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) >= 25
    texts = _texts_of_the_source()
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def test_what_the_architecture_page_names_is_in_the_file():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"([\w/]+\.py)[`)]*: ?`?(\w+)`", page)
    assert len(named) >= 10
    for path, name in named:
        text = (ROOT / "src/manyhands" / path.removeprefix("src/manyhands/")).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path}: {name}"
