"""Compares the size of the package with the tables [tool.manyhands.*] of pyproject.toml; part of `make check`.

Fails where a package has more lines than its table says or far fewer, where a worker loads more, and where a word that
the project no longer uses occurs more often. `python scripts/ratchet.py --write` sets the tables to what there is.
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

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "manyhands"
SETTINGS = ROOT / "pyproject.toml"
START = "[tool.manyhands.lines]"
# A package may be so many lines below its limit before the limit has to follow.
SLACK = 25
# Words that are no longer used in identifiers and messages, with their inflections; keys in files keep them.
WORDS = {
    "befall": "befalls?|befell|befallen",
    "diary": "diary|diaries",
    "dig": "digs?|digging",
    "fewest": "fewest",
    "goes on": "goes on",
    "heed": "heed(s|ed|ing)?",
    "mend": "mend(s|ed|ing)?",
    "newcomer": "newcomers?",
    "pulse": "pulses?",
    "rehearse": "rehears(e|es|ed|al|als|ing)",
    "settle": "settle[sd]?|settling",
    "squad": "squads?",
    "stands still": "stands still",
    "suit": "suit(s|ed|ing)?",
    "tell": "tells?|telling",
    "told": "told",
    "whoever": "whoever",
    "wish": "wish(es|ed|ing)?",
}
# A user's network, which writes down the modules of manyhands that its process has loaded.
NETWORK = """
import json, sys
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        names = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "manyhands"}
        Path("loaded.json").write_text(json.dumps(names))
        return super().forward(images)
"""


def measured() -> dict[str, dict[str, object]]:
    """The tables as they should be: lines by package, what a worker loads, and words by package."""
    lines: Counter[str] = Counter()
    words: dict[str, Counter[str]] = {word: Counter() for word in WORDS}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        package = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "top"
        lines[package] += len(text.splitlines())
        found = "\n".join([*identifiers(text), *messages(text)])
        for word, pattern in WORDS.items():
            if count := len(re.findall(rf"\b({pattern})\b", found, re.IGNORECASE)):
                words[word][package] += count
    lines["all"] = sum(lines.values())
    return {
        "lines": dict(lines),
        "worker": worker(),
        "words": {word: dict(counts) for word, counts in words.items() if counts},
    }


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


def worker() -> dict[str, object]:
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


def differences(limits: dict[str, dict[str, object]], found: dict[str, dict[str, object]]) -> list[str]:
    """A line for each number that is above its limit, or too far below it."""
    differing: list[str] = []
    for table in ("lines", "worker", "words"):
        now, most = flat(found[table]), flat(limits.get(table, {}))
        for name in sorted(now.keys() | most.keys()):
            count, limit = now.get(name, 0), most.get(name, 0)
            if count > limit:
                differing.append(f"{table}: {name} has {count}, and the limit is {limit}")
            elif limit - count > (0 if table == "words" else SLACK):
                differing.append(f"{table}: {name} has {count}: lower the limit of {limit}")
    return differing


def flat(table: dict[str, object]) -> dict[str, int]:
    """A table of tables as one: "heed in cli"."""
    found: dict[str, int] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= {f'"{name}" in {package}': count for package, count in value.items()}
        else:
            found[name] = int(str(value))
    return found


def as_toml(found: dict[str, dict[str, object]]) -> str:
    """The tables as text."""
    written: list[str] = []
    for table, values in found.items():
        written.append(f"[tool.manyhands.{table}]")
        for name, value in values.items():
            key = f'"{name}"' if " " in name else name
            inline = (
                ", ".join(f"{package} = {count}" for package, count in value.items()) if isinstance(value, dict) else ""
            )
            written.append(f"{key} = {{ {inline} }}" if inline else f"{key} = {value}")
        written.append("")
    return "\n".join(written)


def main() -> int:
    """Compares, or with --write sets the tables."""
    text, found = SETTINGS.read_text(encoding="utf-8"), measured()
    if sys.argv[1:] == ["--write"]:
        SETTINGS.write_text(text.partition(START)[0].rstrip() + "\n\n" + as_toml(found), encoding="utf-8")
        return 0
    differing = differences(tomllib.loads(text)["tool"].get("manyhands", {}), found)
    for line in differing:
        print(line)
    if differing:
        print("a limit is raised only with a reason in the commit: python scripts/ratchet.py --write")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
