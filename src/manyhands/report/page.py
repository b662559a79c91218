"""Writes report.html, which needs no network and no scripts, and its pictures as PNG files."""

import io
import itertools
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from manyhands.config.job import Job
from manyhands.core.files import private_files, replaced_on_success
from manyhands.core.terminal import plain, plain_lines, say
from manyhands.report import figures, read, summary, time_shares
from manyhands.report.drawing import GREY, HAIR, INK, fonts_for, house_style, write_figure

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

_NO_FONT = "no font on this machine has {}, so the pictures show boxes instead; install a font such as fonts-noto-cjk"
_ROWS_IN_SIGHT = 20  # longer tables are folded after this many rows
# Colors of pictures that become variables of the page's style, which has a light and a dark form.
_PAGE_COLORS = {INK: "--ink", GREY: "--dim", HAIR: "--hair", "#ffffff": "--sheet"}
_WARNINGS = ("warning", "stopping", "restarted", "left-out", "replaced", "slow", "stall", "undone")
_LEVELS = {"failed": "error", **dict.fromkeys(_WARNINGS, "warning")}


def write_report(path: Path) -> Path:
    """Writes the report of an active or ended run; returns the path of report.html. Raises UserError if none exists."""
    run = read.read_run(path)
    with private_files():
        text = render_page(run, _draw_pictures(run, run.folder.pictures))
        with replaced_on_success(run.folder.report) as part:
            part.write_text(text, encoding="utf-8")
    if run.unreadable:
        say(f"report: {_NO_FONT.format(run.unreadable[:12])}")
    return run.folder.report


def render_page(run: read.RunData, pictures: dict[str, str]) -> str:
    return _template().render(_page_content(run, pictures))


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("manyhands.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Class names may contain terminal escapes, and characters that change the direction of text.
        finalize=lambda value: plain_lines(value) if type(value) is str else value,
    )
    environment.filters.update(percent=summary.percent, number=summary.number)
    return environment.get_template("page.html.j2")


def _page_content(run: read.RunData, pictures: dict[str, str]) -> dict[str, Any]:
    detail = figures.shown_detail(run)
    change, slow = time_shares.change_line(run), time_shares.slow_rank_line(run)
    return {
        "title": " · ".join(plain(str(run.option(part, "name") or f"unknown {part}")) for part in ("data", "model")),
        "folder": run.folder.path.resolve().name,
        "status": summary.status(run),
        "setup": next((event.message.split("\n") for event in reversed(run.events) if event.kind == "setup"), []),
        "best": _evaluation(run, summary.best_evaluation(run)),
        "best_by": summary.best_criterion(run),
        "final": _evaluation(run, summary.final_evaluation(run)),
        "tests": [(name, _evaluation(run, test)) for name, test in run.tests.items()],
        "test_count": next((f"{test.count:,}" for test in run.tests.values()), ""),
        "chosen": summary.CHOSEN[0].upper() + summary.CHOSEN[1:],
        "facts": _run_facts(run),
        "change": change if slow in change else f"{change}; {slow}",
        "unequal": time_shares.unequal_line(run),
        "pictures": {name: (title, Markup(pictures[name])) for name, title, _ in figures.PICTURES if name in pictures},
        "detail": detail,
        "scores": figures.class_scores(detail) if detail else [],
        "in_sight": _ROWS_IN_SIGHT,
        "pairs": figures.confused_pairs(detail, _ROWS_IN_SIGHT) if detail else [],
        "configuration": _configuration(run),
        "environment": _rows(run.environment),
        "plan": _rows(run.plan.model_dump(exclude_unset=True, exclude={"exceptions", "resolved"})),
        "exceptions": [plain(entry) for entry in run.plan.exceptions],
        "time_line": _time_line(run),
        "no_font": _NO_FONT.format(run.unreadable[:12]) if run.unreadable else "",
        "warnings": [event for event in run.events if event.kind == "warning"],
        "failures": run.failures,
        "consequences": [failure for failure in run.failures if failure.consequence],
    }


def _evaluation(run: read.RunData, evaluation: Any) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    few = 0 < summary.count_classes(evaluation) <= summary.FEW_CLASSES
    return {
        "top1": evaluation.top1,
        "top5": None if few else evaluation.top5,
        "loss": evaluation.loss,
        "epoch": summary.evaluation_name(run, evaluation),
        "own": evaluation.metrics,
    }


def _run_facts(run: read.RunData) -> list[tuple[str, str]]:
    speed, evaluation = summary.images_per_s(run), summary.final_evaluation(run)
    found = {
        "images/s": summary.rate(speed) if speed is not None else "",
        "training time": summary.duration(summary.seconds(run)) if run.sessions else "",
        "epochs": _describe_epochs(run) if run.steps else "",
        "processes": _first_value(run, "processes", "world_size", "size"),
        "device": _first_value(run, "device", "devices"),
        "mode": _first_value(run, "mode"),
        "updates skipped": str(len(run.counted("left-out")) or ""),
        "pictures replaced": str(len(summary.bad_pictures(run)) or ""),
        "evaluation samples": f"{evaluation.count:,}".replace(",", "\u202f") if evaluation else "",
    }
    return [(name, value) for name, value in found.items() if value]


def _describe_epochs(run: read.RunData) -> str:
    last = run.steps[-1]
    epoch, done = summary.epoch_position(last)
    epochs = max(epoch, -(-last.total_steps // last.steps_per_epoch))
    reached = epoch - 1 + done / last.steps_per_epoch
    return f"{reached:.3g} of {epochs}" if last.step < last.total_steps else f"{reached:.3g}"


def _first_value(run: read.RunData, *keys: str) -> str:
    for source in (run.plan.as_plain(), run.environment):
        for key in keys:
            if source.get(key) and not isinstance(source[key], dict):
                return plain(_format_value(source[key]))
    return ""


class _Row(NamedTuple):
    name: str
    value: str
    meaning: str = ""


def _configuration(run: read.RunData) -> list[tuple[str, list[_Row]]]:
    """Returns the values of job.toml by section, with descriptions and the selected values of automatic options."""
    loose = [_Row(name, _format_value(value)) for name, value in run.job.items() if not isinstance(value, dict)]
    groups = [("", loose)] if loose else []
    for section, values in run.job.items():
        if not isinstance(values, dict):
            continue
        field, rows = Job.model_fields.get(section), list[_Row]()
        options = getattr(field.annotation, "model_fields", {}) if field else {}
        for name, value, _ in _rows(values):
            chosen = run.plan.resolved.get(f"{section}.{name}")
            if chosen is not None and value != (found := plain(_format_value(chosen))):
                value = f"{found} (chosen; requested: {value})"
            rows.append(_Row(name, value, (name in options and options[name].description) or ""))
        groups.append((section, rows))
    return groups


def _rows(content: Mapping[str, Any], prefix: str = "") -> list[_Row]:
    """Flattens nested objects to rows with dotted names; a list of plain values is one row."""
    rows: list[_Row] = []
    for key, value in content.items():
        if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            value = {str(number): entry for number, entry in enumerate(value)}
        if isinstance(value, Mapping) and value:
            rows += _rows(value, f"{prefix}{key}.")
        else:
            rows.append(_Row(plain(f"{prefix}{key}"), _format_value(value)))
    return rows


def _format_value(value: Any) -> str:
    """Formats a value as in job.toml, but without quotes."""
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or "–"
    if value is None or isinstance(value, bool):
        return "–" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _time_line(run: read.RunData) -> list[dict[str, str]]:
    """Returns a row for each event, with the level "", "warning" or "error". Consecutive saves share a row."""
    start = run.sessions[0].start if run.sessions else 0.0
    lines: list[dict[str, str]] = []
    for kind, group in itertools.groupby(run.events, lambda event: event.kind):
        events = list(group)
        for event in events[:1] if kind == "saved" else events:
            text = plain(event.message)
            if kind == "saved" and len(events) > 1:
                text = f"{len(events)} times, from step {event.step} to step {events[-1].step}"
            elif event.step is not None and str(event.step) not in text:
                text = f"step {event.step}" + (f": {text}" if text else "")
            text += f" (rank {event.rank})" if event.rank else ""
            when = {"time": summary.format_utc(event.time), "since": summary.duration(event.time - start)}
            lines.append({**when, "kind": kind, "text": text, "level": _LEVELS.get(kind, "")})
    return lines


def _draw_pictures(run: read.RunData, folder: Path) -> dict[str, str]:
    """Draws the pictures to PNG files; returns {name: SVG text}. Sets `run.unreadable` to letters without a font."""
    drawn: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    fonts, run.unreadable = fonts_for(name for detail in (run.best, run.last) if detail for name in detail.classes)
    with house_style(fonts):
        for name, _, draw in figures.PICTURES:
            file = folder / f"{name}.png"
            if figure := draw(run):
                drawn[name] = _svg_text(figure, name)
                write_figure(figure, file)
            else:
                file.unlink(missing_ok=True)
    return drawn


def _svg_text(figure: "Figure", name: str) -> str:
    """Returns a figure as an SVG element that fits into the page and shares no id with another figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # The element's only style rule would apply to the entire page, whose own style contains the rule.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", lambda tag: _inline_tag(tag.group(), name), text)


def _inline_tag(tag: str, name: str) -> str:
    for color, variable in _PAGE_COLORS.items():
        if color != "#ffffff" or not tag.startswith("<text"):  # letters on a colored cell stay white
            tag = tag.replace(color, f"var({variable})")
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag).replace("xlink:href", "href").replace('href="#', f'href="#{name}-')
    tag = re.sub(r'\bid="', f'id="{name}-', tag).replace("url(#", f"url(#{name}-")
    if not tag.startswith("<svg"):
        return tag
    # As wide as the page allows, with letters no larger than the page's: 1.45 px per point.
    width = re.search(r' width="([\d.]+)pt"', tag)
    limit = f' style="max-width:{float(width[1]) * 1.45:.0f}px"' if width else ""
    return re.sub(r' (width|height|version)="[^"]*"', "", tag).replace("<svg", f"<svg{limit}", 1)
