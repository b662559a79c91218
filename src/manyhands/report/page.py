"""Writes report.html: one file that needs no network and no script, and its pictures as PNG beside it."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from manyhands.core.files import private_files, replacing
from manyhands.core.run_folder import RunFolder
from manyhands.core.terminal import plain, plain_lines, say
from manyhands.report import summary, tables, words
from manyhands.report.mistakes import class_scores, confused_pairs, shown_detail
from manyhands.report.pictures import PICTURES, draw_all
from manyhands.report.read import RunData, read_run
from manyhands.report.time_shares import change_line, slow_rank, unequal_line

if TYPE_CHECKING:
    from jinja2 import Template

_NO_FONT = "no font on this machine has {}, so the pictures show boxes instead; install a font such as fonts-noto-cjk"
# A longer table is folded, with its first rows in sight.
_ROWS_IN_SIGHT = 20


def write_report(path: Path) -> Path:
    """Writes the report of the run in `path`, in whatever state the run is, and returns the page's path.

    The same files give the same page, byte for byte. Readers never see half of it. Raises UserError: there is no run.
    """
    run = read_run(path)
    folder = RunFolder(path)
    with private_files():
        text = render(run, draw_all(run, folder.pictures))
        with replacing(folder.report) as part:
            part.write_text(text, encoding="utf-8")
    if run.unreadable:
        say(f"report: {_NO_FONT.format(run.unreadable[:12])}")
    return folder.report


def render(run: RunData, pictures: dict[str, str]) -> str:
    """The page as text; `pictures` are SVG elements by name."""
    return _template().render(_content(run, pictures))


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("manyhands.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(percent=words.percent, number=words.number)
    return environment.get_template("page.html.j2")


def _shown(value: object) -> object:
    """What others wrote as the page shows it: a name of a class may hold escapes, and marks that turn its direction."""
    return plain_lines(value) if type(value) is str else value


def _content(run: RunData, pictures: dict[str, str]) -> dict[str, Any]:
    detail = shown_detail(run)
    scores = class_scores(detail) if detail else []
    return {
        "title": f"{_job_value(run, 'data', 'name')} · {_job_value(run, 'model', 'name')}",
        "folder": run.folder.path.resolve().name,
        "status": summary.status(run),
        "setup": next((event.message.split("\n") for event in reversed(run.events) if event.kind == "setup"), []),
        "best": _evaluation(run, summary.best_evaluation(run)),
        "best_by": summary.best_by(run),
        "final": _evaluation(run, summary.final_evaluation(run)),
        "tests": [(name, _evaluation(run, test)) for name, test in run.tests.items()],
        "test_count": next((f"{test.count:,}" for test in run.tests.values()), ""),
        "chosen": summary.CHOSEN[0].upper() + summary.CHOSEN[1:],
        "facts": facts(run),
        "change": _change(run),
        "unequal": unequal_line(run),
        "pictures": {p.name: (p.title, Markup(pictures[p.name])) for p in PICTURES if p.name in pictures},
        "detail": detail,
        "scores": scores,
        "in_sight": _ROWS_IN_SIGHT,
        "pairs": confused_pairs(detail, _ROWS_IN_SIGHT) if detail else [],
        "configuration": tables.configuration(run),
        "environment": tables.flat(run.environment),
        "plan": tables.flat(run.plan.model_dump(exclude_unset=True, exclude={"exceptions", "resolved"})),
        "exceptions": tables.exceptions(run),
        "time_line": tables.time_line(run),
        "no_font": _NO_FONT.format(run.unreadable[:12]) if run.unreadable else "",
        "warnings": [event for event in run.events if event.kind == "warning"],
        "failures": run.failures,
        "consequences": [failure for failure in run.failures if failure.consequence],
    }


def _job_value(run: RunData, section: str, key: str) -> str:
    values = run.job.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return plain(str(value)) if value else f"unknown {section}"


def _evaluation(run: RunData, evaluation: Any) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    name = summary.evaluation_name(run, evaluation)
    few = 0 < summary.classes_of(evaluation) <= words.FEW_CLASSES
    top5 = None if few else evaluation.top5
    return {"top1": evaluation.top1, "top5": top5, "loss": evaluation.loss, "epoch": name, "own": evaluation.metrics}


def facts(run: RunData) -> list[tuple[str, str]]:
    """The small figures under the headline: name and value, only what is known."""
    speed, evaluation = summary.images_per_s(run), summary.final_evaluation(run)
    found: list[tuple[str, str | None]] = [
        ("images/s", words.rate(speed) if speed is not None else None),
        ("training time", words.duration(summary.seconds(run)) if run.sessions else None),
        ("epochs", _epochs(run)),
        ("processes", _first(run, "processes", "world_size", "size")),
        ("device", _first(run, "device", "devices")),
        ("mode", _first(run, "mode")),
        ("updates skipped", str(len(run.counted("left-out")) or "")),
        ("pictures replaced", str(len(summary.bad_pictures(run)) or "")),
        ("evaluation samples", f"{evaluation.count:,}".replace(",", "\u202f") if evaluation else None),
    ]
    return [(name, value) for name, value in found if value]


def _change(run: RunData) -> str:
    """What would help most, and who is slow, where that isn't the same."""
    change, slow = change_line(run), slow_rank(run)
    return change if slow in change else f"{change}; {slow}"


def _epochs(run: RunData) -> str | None:
    if not run.steps:
        return None
    last = run.steps[-1]
    epoch, done = words.place(last)
    all_epochs = max(epoch, -(-last.total_steps // last.steps_per_epoch))
    reached = epoch - 1 + done / last.steps_per_epoch
    return f"{reached:.3g} of {all_epochs}" if last.step < last.total_steps else f"{reached:.3g}"


def _first(run: RunData, *keys: str) -> str | None:
    """The first of `keys` that the plan or the environment tells."""
    for source in (run.plan.as_plain(), run.environment):
        for key in keys:
            if source.get(key) and not isinstance(source[key], dict):
                return plain(tables.shown(source[key]))
    return None
