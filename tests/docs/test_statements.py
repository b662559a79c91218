"""What the guides say in figures, against the code that they speak of."""

import ast
import re

import pytest

from manyhands.config.load import load_job
from manyhands.parallel.options import ParallelOptions
from tests.docs.pages import ROOT, chinese_of

RECIPES = ROOT / "docs" / "guides" / "recipes.md"
MODES = ROOT / "docs" / "guides" / "several-processes.md"
# What stands for data that has no name of its own.
EXAMPLES = {"file.py": "data.py:make", "fit(…)": "objects", "图": "./pictures", "a": "./pictures"}


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
