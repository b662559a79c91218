"""Writes docs/reference.md and docs/zh/reference.md from the job's own declaration.

Run it after an option was added or changed: python scripts/build_reference.py. A test compares the pages with what it
would write. The Chinese meanings lie in docs/zh/meanings.toml; where one is missing the English one stands.
"""

import json
import re
import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from manyhands.config.job import Job

ROOT = Path(__file__).resolve().parent.parent
ENGLISH = ROOT / "docs" / "reference.md"
CHINESE = ROOT / "docs" / "zh" / "reference.md"
MEANINGS = ROOT / "docs" / "zh" / "meanings.toml"

TYPES_IN_CHINESE = {
    "whole number": "整数",
    "list of numbers": "数值列表",
    "list of texts": "字符串列表",
    "true or false": "true 或 false",
    "number": "数值",
    "text": "字符串",
    "table": "表",
    " or ": " 或 ",
    " and ": " 且 ",
}
HEAD = """# All options of a job

[中文](zh/reference.md) · [README](../README.md)

<!-- written by scripts/build_reference.py; change the options in the code, not here -->

An option's key is its path: `train.lr` is `lr` in the section `[train]` of job.toml, `--set train.lr=0.1` or
`--train.lr 0.1` on the command line, `MANYHANDS_TRAIN__LR=0.1` in the environment, and in Python `lr=0.1` (the section
`train`) or `data__workers=4` (any other). `manyhands train … --show-config` prints the values in force and where each
comes from. The defaults below are those without a recipe; see [recipes](guides/recipes.md).
"""
CHINESE_HEAD = """# 全部选项

[English](../reference.md) · [README](../../README.zh-CN.md)

<!-- 由 scripts/build_reference.py 生成；请在代码中修改选项，不要修改本页 -->

选项的键写作“节名.选项名”，例如 `train.lr`。将 `train.lr` 设为 0.1 的方法有以下几种：

- job.toml：在 `[train]` 一节中写 `lr = 0.1`
- 命令行：加参数 `--set train.lr=0.1` 或 `--train.lr 0.1`
- 环境变量：设置 `MANYHANDS_TRAIN__LR=0.1`
- Python：传入 `lr=0.1`（`train` 以外各节的选项要加上节名，例如 `data__workers=4`）

执行 `manyhands train … --show-config` 可以查看当前生效的值及其来源。
下面列出的默认值不包括配方中的设置，见[配方](guides/recipes.md)。
"""


def sections() -> dict[str, type[BaseModel]]:
    """The job's sections by name."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Job.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        found[name] = field.annotation
    return found


def type_words(annotation: Any) -> str:
    """An option's type as a reader of TOML knows it."""
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(json.dumps(word) if isinstance(word, str) else str(word) for word in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(type_words(part) for part in get_args(annotation))
    if origin in (tuple, dict) or annotation in (tuple, dict):
        if origin is tuple:
            return "list of texts" if str in get_args(annotation) else "list of numbers"
        return "table"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[annotation]


def limits(field: FieldInfo) -> str:
    """The range that a number must lie in."""
    words = {Ge: "≥ {}", Gt: "> {}", Le: "≤ {}", Lt: "< {}"}
    values = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}
    found = [
        words[type(item)].format(getattr(item, values[type(item)])) for item in field.metadata if type(item) in words
    ]
    return " and ".join(found)


def rows(chinese: dict[str, str]) -> dict[str, list[str]]:
    """The lines of each section's table; with the Chinese meaning where there is one."""
    found: dict[str, list[str]] = {}
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            default = list(default) if isinstance(default, tuple) else default
            kind = " ".join(filter(None, (type_words(field.annotation), limits(field))))
            kind = translated(kind) if chinese else kind
            meaning = chinese.get(f"{section}.{name}") or field.description or ""
            cells = (f"`{section}.{name}`", kind, f"`{json.dumps(default)}`", meaning)
            found.setdefault(section, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return found


def translated(kind: str) -> str:
    """A type's words in Chinese."""
    for english, chinese in TYPES_IN_CHINESE.items():
        kind = kind.replace(english, chinese)
    return re.sub(r"(?<=[一-鿿]) (?=[一-鿿])", "", kind).replace(", ", "、")


def page(head: str, titles: tuple[str, str, str, str], chinese: dict[str, str]) -> str:
    """A whole page."""
    parts = [head]
    for section, lines in rows(chinese).items():
        about = chinese.get(section) or (sections()[section].__doc__ or "").strip().partition("\n")[0]
        parts.append(f"\n## {section}\n\n{about}\n\n| {' | '.join(titles)} |\n| --- | --- | --- | --- |\n")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def pages() -> dict[Path, str]:
    """What each page should hold."""
    words = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))
    chinese = {
        f"{section}.{key}" if key else section: text for section, table in words.items() for key, text in table.items()
    }
    return {
        ENGLISH: page(HEAD, ("key", "type", "default", "meaning"), {}),
        CHINESE: page(CHINESE_HEAD, ("键", "类型", "默认值", "含义"), chinese),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
