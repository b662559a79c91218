"""Finds the documents and what is in them: fenced blocks with the mark before them, commands, links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_CONTINUED = re.compile(r"\\\n\s*")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    mark: str  # the comment before it, such as "test", "test: together" or "file: data.py"; empty if there is none
    language: str  # the word behind the fence
    text: str

    @property
    def lines(self) -> list[str]:
        """Lines without comments and empty ones; what a reader of either language types."""
        kept = (re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in _CONTINUED.sub(" ", self.text).splitlines())
        return [line for line in kept if line]


def english_pages():
    """Every page that has a Chinese counterpart."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def chinese_of(page):
    """The Chinese counterpart of an English page."""
    return ROOT / "README.zh-CN.md" if page.name == "README.md" else ROOT / "docs" / "zh" / "guides" / page.name


def all_pages():
    """Every document of the project."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    """The fenced blocks of a page, in order."""
    return [Block(m["mark"] or "", m["language"], m["text"]) for m in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def table_commands(page):
    """The arguments of each `manyhands …` in a page's tables, as text."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`manyhands ([^`]+)`", row)]


def commands(page):
    """The arguments of each `manyhands …` in a page's shell blocks and tables, as text; also behind `python -m` and
    torchrun.
    """
    found = table_commands(page)
    for block in blocks(page):
        if block.language in {"sh", "console"}:
            for line in block.lines:
                match = re.match(r"(?:\$ )?(?:\S.* -m )?manyhands (.*)", line)
                found += [match[1]] if match else []
    return found


def links(page):
    """Relative links of a page, without anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = (match["target"].partition("#")[0] for match in _LINK.finditer(text))
    return [target for target in targets if target and "://" not in target]
