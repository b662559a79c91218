"""The documents are true: examples run, commands parse, both languages hold the same ones; figures are the code's.

A block after `<!-- file: NAME -->` is written to that file; one after `<!-- test -->` is run, line by line. After
`<!-- test: slow -->` it belongs to the slow tests, after `<!-- test: slow together -->` its lines run at the same time.
The Chinese pages hold the same blocks but for comments, so that the English ones are run alone.
"""

import ast
import contextlib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from scripts import build_reference

from manyhands.cli.main import main, make_app
from manyhands.config.load import load_job
from manyhands.parallel.options import ParallelOptions
from tests.e2e.command import finish, shell, training
from tests.fork_server import fork_variables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Those that have a Chinese counterpart.
ENGLISH = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
RECIPES = ROOT / "docs" / "guides" / "recipes.md"
MODES = ROOT / "docs" / "guides" / "several-processes.md"
# What stands for data that has no name of its own.
EXAMPLES = {"file.py": "data.py:make", "fit(…)": "objects", "图": "./pictures", "a": "./pictures"}
BLOCK = re.compile(r"(?:<!-- ([^>]*?) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block."""

    mark: str  # the comment before it, such as "test", "test: together" or "file: data.py"; empty if there is none
    language: str  # the word behind the fence
    text: str

    @property
    def lines(self):
        """Lines without comments and empty ones; what a reader of either language types."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [kept for line in joined.splitlines() if (kept := re.sub(r"(^|\s+)#.*$", "", line).rstrip())]


def blocks(page):
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def chinese_of(page):
    return ROOT / "README.zh-CN.md" if page.name == "README.md" else ROOT / "docs" / "zh" / "guides" / page.name


def table_commands(page):
    """The arguments of each `manyhands …` in a page's tables, as text."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`manyhands ([^`]+)`", row)]


def commands(page):
    """Those of its tables and shell blocks, also behind `python -m` and torchrun."""
    lines = [line for block in blocks(page) if block.language in {"sh", "console"} for line in block.lines]
    typed = (re.match(r"(?:\$ )?(?:\S.* -m )?manyhands (.*)", line) for line in lines)
    return [*table_commands(page), *(match[1] for match in typed if match)]


def _name(page):
    return str(page.relative_to(ROOT))


def _pages_with(mark, *, slow):
    """The README's examples belong to the fast tests; those of all guides together take a minute."""
    for page in ENGLISH:
        if any(block.mark.startswith(mark) for block in blocks(page)):
            marks = [pytest.mark.slow] if slow or page.parent != ROOT else []
            yield pytest.param(page, slow, id=_name(page) + " slow" * slow, marks=marks)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("page", "slow"), [*_pages_with("test", slow=False), *_pages_with("test: slow", slow=True)])
def test_examples_run(page, slow, tmp_path):
    for block in blocks(page):
        kind, _, words = block.mark.partition(": ")
        if kind == "file":
            (tmp_path / words).write_text(block.text, encoding="utf-8")
        elif kind == "test" and ("slow" in words) == slow:
            _run(block.lines, tmp_path, {} if page.parent == ROOT else fork_variables(), together="together" in words)


def _run(lines, folder, variables, *, together):
    """Runs shell lines as a reader would; the guides' commands are forks."""
    path = os.pathsep.join([str(ROOT / "src"), variables.get("PYTHONPATH", "")])
    variables = {**variables, "MANYHANDS_CLUSTER__DEVICE": "cpu", "PYTHONPATH": path}
    with contextlib.ExitStack() as stack:
        started = []
        for line in lines:
            started.append(stack.enter_context(training([line], by=shell, cwd=folder, **variables)))
            if not together:
                finish(started[-1], code=0)
        for process in started if together else ():
            finish(process, code=0)


@pytest.mark.parametrize("page", ENGLISH, ids=_name)
def test_both_languages_hold_the_same_commands(page):
    def typed(path):
        return [(b.mark, b.language, b.lines) for b in blocks(path) if b.language]

    assert typed(page) == typed(chinese_of(page))
    assert table_commands(page) == table_commands(chinese_of(page))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_parses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.mark == "file: job.toml":
            Path("job.toml").write_text(block.text, encoding="utf-8")
    for command in commands(page):
        arguments = shlex.split(command.replace("$PWD", str(tmp_path)))
        if arguments[0] in {"train", "imagenet"}:  # as far as their configuration
            with pytest.raises(SystemExit) as ended:
                main(arguments if "--show-config" in arguments else [arguments[0], "--show-config", *arguments[1:]])
            assert ended.value.code == 0
        else:  # flags and the number of arguments
            make_app().parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere_and_python_blocks_are_python(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target, _ in re.findall(r"\]\(([^)\s#]+)(#[^)\s]*)?\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, _name(page), "exec")


def test_the_reference_is_up_to_date():
    for path, text in build_reference.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run scripts/build_reference.py: {path} is out of date"


@pytest.mark.parametrize("page", [RECIPES, chinese_of(RECIPES)], ids=["en", "zh"])
def test_the_recipes_are_those_of_the_table(page):
    lines = [line.strip("|").split("|") for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    found = [[cell.strip() for cell in line] for line in lines if len(line) == 7 and line[2].strip().isdecimal()]
    assert len(found) == 11
    for data, network, epochs, batch, rate, schedule, augmentation in found:
        known = re.match(r"`([\w-]+)`$", data)
        base = known[1] if known else next(EXAMPLES[word] for word in EXAMPLES if data.strip("`").startswith(word))
        name = network.strip("`") if network.startswith("`") else ""
        job = load_job({"data.name": base, "model.name": name or None}, environment={}).job
        # The network is the recipe's own, where it has one; with several of them any may be named.
        alone = load_job({"data.name": base}, environment={}).job
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


def test_the_messages_that_the_chinese_page_explains_are_those_of_the_source():
    """In which an ellipsis stands for each value, or several values in a row."""
    texts = set()
    for path in (ROOT / "src/manyhands").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.add(re.sub("…+", "…", "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    page = (ROOT / "docs/zh/guides/messages.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) >= 25
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def test_what_the_architecture_page_names_is_in_the_file():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"([\w/]+\.py)[`)]*: ?`?(\w+)`", page)
    assert len(named) >= 10
    for path, name in named:
        text = (ROOT / "src/manyhands" / path.removeprefix("src/manyhands/")).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path}: {name}"
