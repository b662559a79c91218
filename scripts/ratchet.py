"""Compares the size of the package with the tables [tool.manyhands.*] of pyproject.toml; part of `make check`.

Fails where a package has more lines than its table says or far fewer, where a worker loads more, and where a word
occurs that the project no longer uses. `python scripts/ratchet.py --write` sets the tables to what there is.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

import tomli_w

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "manyhands"
SETTINGS = ROOT / "pyproject.toml"
START = "[tool.manyhands.lines]"
# A package may be so many lines below its limit before the limit has to follow.
SLACK = 25
# Words that are no longer used in identifiers and messages.
WORDS = re.compile(
    r"\b(befalls?|befell|befallen|diary|diaries|digs?|digging|fewest|goes on|heed(s|ed|ing)?|mend(s|ed|ing)?|"
    r"newcomers?|pulses?|rehears(e|es|ed|al|als|ing)|settle[sd]?|settling|squads?|stands still|suit(s|ed|ing)?|"
    r"tells?|telling|told|whoever|wish(es|ed|ing)?)\b",
    re.IGNORECASE,
)
# Keys of files written by older versions, a name that random numbers follow from, and a method of Python's files.
KEPT = {"mend", "wish", "rehearse", "tell"}
# A user's network, which writes down the modules of manyhands that its process has loaded.
NETWORK = """
import json, sys
from pathlib import Path

import tomli_w
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        names = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "manyhands"}
        Path("loaded.json").write_text(json.dumps(names))
        return super().forward(images)
"""


def measured() -> dict[str, dict[str, int]]:
    """The tables as they should be: lines by package, and what a worker loads."""
    lines: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "top"
        lines[package] += len(path.read_text(encoding="utf-8").splitlines())
    lines["all"] = sum(lines.values())
    return {"lines": dict(lines), "worker": worker()}


def discontinued() -> list[str]:
    """A line for each file that has words which are no longer used."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        texts = [*identifiers(text), *messages(text)]
        if used := {match[0] for one in texts if one not in KEPT for match in WORDS.finditer(one)}:
            found.append(f"{path.relative_to(ROOT)} has words that are no longer used: {', '.join(sorted(used))}")
    return found


def identifiers(text: str) -> list[str]:
    """Every identifier of a source text as words: goes_on is "goes on"."""
    nodes = (node for node in ast.walk(ast.parse(text)) if not isinstance(node, ast.Constant))
    names = (value for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, str))
    return [" ".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)) for name in names]


def messages(text: str) -> list[str]:
    """Every string of a source text that is no docstring."""
    tree = ast.parse(text)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [str(node.value) for node in strings if id(node) not in statements]


def worker() -> dict[str, int]:
    """How many modules of ours one worker of `train digits net.py:Net -n 2` loads, and their lines."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(NETWORK, encoding="utf-8")
        job = ["train", "digits", "net.py:Net", "-n", "2", "--device", "cpu", "--epochs", "1", "--out", "run"]
        quick = ["--set", "run.report=false", "--set", "train.precision=fp32", "--set", "train.channels_last=false"]
        subprocess.run(
            [sys.executable, "-m", "manyhands", *job, *quick], cwd=folder, check=True, capture_output=True, timeout=120
        )
        files = json.loads(Path(folder, "loaded.json").read_text(encoding="utf-8")).values()
    return {
        "modules": len(files),
        "lines": sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files),
    }


def differences(limits: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """A line for each number that is above its limit, or too far below it."""
    differing: list[str] = []
    for table in ("lines", "worker"):
        now, most = found[table], limits.get(table, {})
        for name in sorted(now.keys() | most.keys()):
            count, limit = now.get(name, 0), most.get(name, 0)
            if count > limit:
                differing.append(f"{table}: {name} has {count}, and the limit is {limit}")
            elif limit - count > SLACK:
                differing.append(f"{table}: {name} has {count}: lower the limit of {limit}")
    return differing


def main() -> int:
    """Compares, or with --write sets the tables."""
    text, found = SETTINGS.read_text(encoding="utf-8"), measured()
    if sys.argv[1:] == ["--write"]:
        SETTINGS.write_text(
            text.partition(START)[0].rstrip() + "\n\n" + tomli_w.dumps({"tool": {"manyhands": found}}), encoding="utf-8"
        )
        return 0
    limits = tomllib.loads(text)["tool"].get("manyhands", {})
    differing = [*discontinued(), *differences(limits, found)]
    for line in differing:
        print(line)
    if differing:
        print("a limit is raised only with a reason in the commit: python scripts/ratchet.py --write")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
