"""The result and the page: every number from the records, and nothing a class name says is obeyed."""

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
from fake_run import FakeRun, complete
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.core.records import EvaluationDetail, Running
from manyhands.report.drawing import smooth, thin
from manyhands.report.figures import class_scores, confused_pairs, curves
from manyhands.report.follow import look
from manyhands.report.page import render, write_report
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines, result_object


class Structure(HTMLParser):
    """Checks that elements nest, and collects ids."""

    EMPTY = frozenset({"meta", "br", "path", "use", "rect", "image", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]


def structure(page):
    parser = Structure()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    return parser


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished")
    complete(path, epochs=10, classes=["飞机", "<script>alert(1)</script>", "$x_1$", "&amp;", '" id="x', "f", "g"])
    write_report(path)
    return path


def test_every_number_comes_from_the_records(finished):
    run, result = read_run(finished), result_object(read_run(finished))
    best = max(run.evaluations, key=lambda evaluation: evaluation.top1)
    assert result == {
        "run": str(finished),
        "best_top1": best.top1,
        "final_top1": run.evaluations[-1].top1,
        "best_epoch": best.epoch,
        "final_top5": run.evaluations[-1].top5,
        "final_loss": run.evaluations[-1].loss,
        "best_metrics": {},
        "final_metrics": {},
        "images_per_s": statistics.median(step.images_per_s for step in run.steps[10:]),
        "steps": 1000,
        "epochs": 10,
        "test_top1": None,
        "test_final_top1": None,
        "status": "finished",
        "report": str(finished / "report.html"),
    }
    text = "\n".join(result_lines(run))
    assert f"{100 * best.top1:.1f} %" in text
    assert str(finished / "report.html") in text


def test_the_page_needs_nothing_else(finished):
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|@import|url\((?!#)", page)
    parser = structure(page)
    assert not parser.tags & {"script", "link", "iframe", "object"}
    assert "飞机" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert {file.name for file in (finished / "pictures").iterdir()} == {
        f"{name}.png" for name in ("curves", "learning-rate", "throughput", "time", "confusion", "classes")
    }


def test_the_page_tells_the_configuration_and_the_plan(finished):
    page = (finished / "report.html").read_text(encoding="utf-8")
    for section in ("data", "model", "train", "parallel", "sync", "cluster", "checkpoint", "run"):
        assert f"[{section}]" in page
    assert "label_smoothing" in page
    assert "norm_group = local: the result depends" in page
    assert "NVIDIA H200" in page
    assert "n2 waits 34 % of its time for data" in page
    assert "cifar10 · resnet18" in page


def test_charts_fit_a_phone_and_take_the_page_s_colours(tmp_path):
    complete(tmp_path, epochs=4, classes=[f"kind {number}" for number in range(12)])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    widths = [float(width) for width in re.findall(r'<svg[^>]* viewBox="0 0 ([\d.]+) ', page)]
    assert len(widths) == 6
    assert 330 / max(widths) * 10 > 7.5  # pixels of a letter of 10 points, where a phone has 330 for the chart
    style, charts = page.partition("</style>")[0], "".join(re.findall(r"(?s)<svg.*?</svg>", page))
    assert "min-width: 34rem" not in style
    shades = re.findall(r"(fill|stroke): (#1f2933|#e3e7ec|#6b7280|#ffffff)", re.sub("<text[^>]*>", "", charts))
    assert shades == []
    assert all(f"var({name})" in charts for name in ("--ink", "--dim", "--hair", "--sheet"))
    assert "fill: #ffffff" in charts  # counts on dark cells


def test_what_happened_comes_before_the_plan_and_a_class_has_a_recall(finished):
    page = (finished / "report.html").read_text(encoding="utf-8")
    places = [page.index(f"<h2>{name}</h2>") for name in ("Training", "Classes", "What happened")]
    places += [page.index(f"<h2>{name}</h2>") for name in ("How the work was split", "Configuration", "Environment")]
    assert places == sorted(places)
    assert '<th scope="col">recall</th>' in page
    assert '<th scope="col">accuracy</th>' not in page
    assert "Recall by class" in page


def test_the_same_files_give_the_same_page(finished):
    before = (finished / "report.html").read_bytes(), (finished / "pictures" / "curves.png").read_bytes()
    write_report(finished)
    assert before == ((finished / "report.html").read_bytes(), (finished / "pictures" / "curves.png").read_bytes())
    assert not [file for file in finished.rglob("*") if file.name.startswith(".")]


def test_a_run_that_only_began(tmp_path):
    FakeRun(tmp_path).begin()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    structure(page)
    assert "No evaluation was made yet" in page
    result = result_object(read_run(tmp_path))
    assert result["best_top1"] is None
    assert result["status"] == "stopped"
    lines = result_lines(read_run(tmp_path))
    assert any("no evaluation" in line for line in lines)
    assert lines[-1] == f"to resume: manyhands resume {tmp_path}"


def test_a_failed_run_shows_the_first_cause(tmp_path):
    run = FakeRun(tmp_path).begin().train(0, 60)
    run.fail(1, step=60).fail(0, consequence=True)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    structure(page)
    assert "Failure: rank 1 on n2" in page
    assert "Ended as a consequence: 1 process<" in page
    assert "--set train.micro_batch=96" in page
    assert result_object(read_run(tmp_path))["status"] == "failed"


def test_a_failure_that_was_survived_is_no_failed_run(tmp_path):
    FakeRun(tmp_path, epochs=1).begin().train(0, 50).fail(1).resume(0).train().finish()
    assert result_object(read_run(tmp_path))["status"] == "finished"


def test_stopped_and_then_resumed(tmp_path):
    run = FakeRun(tmp_path, epochs=2).begin().train(0, 100)
    run.event("stopped")
    assert result_object(read_run(tmp_path))["status"] == "stopped"
    run.resume(100).train(100)
    assert result_object(read_run(tmp_path))["status"] == "finished", "all steps are done"


def test_nan_is_null_for_machines(tmp_path):
    run = FakeRun(tmp_path).begin().train(0, 100)
    text = run.folder.metrics.read_text()
    run.folder.metrics.write_text(re.sub(r'"loss":[\d.]+', '"loss":null', text))
    result = result_object(read_run(tmp_path))
    assert result["final_loss"] is None
    json.dumps(result, allow_nan=False)
    structure(write_report(tmp_path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("count", [1, 13, 51])
def test_any_number_of_classes(tmp_path, count):
    names = [f"类别 {number}" for number in range(count)]
    FakeRun(tmp_path, classes=names, epochs=1, steps_per_epoch=20).begin().train().finish()
    structure(write_report(tmp_path).read_text(encoding="utf-8"))


@settings(max_examples=40)
@example(["a\x1b[31mb\u202ec"], "\x9b2J\u2066")
@given(names=st.lists(st.text(max_size=30), min_size=1, max_size=6), message=st.text(max_size=40))
def test_names_and_messages_are_only_text(tmp_path_factory, names, message):
    run = FakeRun(tmp_path_factory.mktemp("run"), classes=names, epochs=1, steps_per_epoch=2, record_every=1).begin()
    run.train()
    run.event("warning", message="<b>" + message)
    page = render(read_run(run.path), {})
    parser = structure(page)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", page)
    assert "b" not in parser.tags
    assert "script" not in parser.tags


CELLS = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(1, 50), min_size=1)


@given(CELLS)
def test_classes_and_pairs_account_for_every_sample(cells):
    total = sum(cells.values())
    detail = EvaluationDetail(
        time=0.0,
        epoch=1,
        step=1,
        count=total,
        top1=0.5,
        top5=0.5,
        loss=1.0,
        classes=[str(number) for number in range(7)],
        confusion=[(true, guess, count) for (true, guess), count in cells.items()],
    )
    scores, pairs = class_scores(detail), confused_pairs(detail, most=100)
    assert sum(score.count for score in scores) == sum(score.predicted for score in scores) == total
    assert sum(score.right for score in scores) + sum(pair.count for pair in pairs) == total
    recalls = [score.recall for score in scores if score.count]
    assert recalls == sorted(recalls)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=2000))
def test_smoothing_and_thinning_stay_within_the_curve(values):
    smoothed = smooth(values, [1.0] * len(values))
    xs, ys = thin(list(range(len(values))), smoothed)
    assert len(xs) == len(ys) <= 600
    assert min(values) - 1e-6 <= min(ys)
    assert max(ys) <= max(values) + 1e-6


def test_no_torch_and_no_early_matplotlib(finished):
    code = (
        "import sys, pathlib\n"
        "from manyhands.report import figures, follow, page, read, screen, summary\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules\n"
        "page.write_report(pathlib.Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(finished)], check=True, timeout=60)


def test_a_loss_over_many_decades_has_plain_numbers_on_its_axis(tmp_path):
    complete(tmp_path)
    run = read_run(tmp_path)
    steps = [step.model_copy(update={"loss": step.loss**6}) for step in run.steps]
    figure = curves(dataclasses.replace(run, steps=steps))
    figure.draw_without_rendering()
    axis = figure.axes[0]
    assert axis.get_yscale() == "log"
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert all(float(text) > 0 for text in labels if text)
    assert any(labels)


@pytest.mark.parametrize(
    "spoil", ["a step of 400 digits", "half a character", "no evaluation", "a pipe", "an infinite share"]
)
def test_records_that_nobody_wrote_are_left_out_and_the_page_is_made(tmp_path, spoil):
    run = FakeRun(tmp_path, epochs=1, steps_per_epoch=4, record_every=1).begin().train().finish()
    metrics, events = run.path / "metrics.jsonl", run.path / "events.jsonl"
    if spoil == "a step of 400 digits":
        metrics.write_text(metrics.read_text().replace('"step":4', f'"step":{10**400}'))
    elif spoil == "half a character":
        with events.open("a") as file:
            file.write('{"v": 1, "time": 9, "kind": "warning", "message": "\\ud800"}\n')
    elif spoil == "no evaluation":
        kept = [line for line in metrics.read_text().splitlines(keepends=True) if "evaluation" not in line]
        metrics.write_text("".join(kept))
        (run.path / "evaluations" / "last.json").unlink()
    elif spoil == "a pipe":
        events.unlink()
        os.mkfifo(events)
    else:
        metrics.write_text(metrics.read_text().replace('"data_share":', '"data_share":1e999, "x":'))
    found = read_run(run.path)
    assert "</html>" in render(found, {})
    json.dumps(result_object(found), allow_nan=False)
    assert result_lines(found)
    look(Running(time=0, pid=1, created=0, host="h", run=str(run.path), hosts=["h"], command=["x"]))


def test_unequal_shares_stand_below_where_the_time_goes(tmp_path):
    run = FakeRun(tmp_path / "run", epochs=2, steps_per_epoch=4, record_every=1).begin()
    run.event("shares", shares=[48, 16], step=0, message="shares of the batch of 64 samples, by process: 48, 16")
    run.train().finish()
    page = write_report(run.path).read_text(encoding="utf-8")
    line = "Unequal shares of the batch of 64 samples, by process: 48, 16"
    below = page[page.index('<figure id="time">') :]
    assert line in unescape(below[: below.index("<h2>")])
