"""The screen: one line that fits on a terminal, plain lines elsewhere."""

import io
import re

import pytest
from fake_run import FakeRun
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from manyhands.cli.evaluate import prediction_line
from manyhands.core.quantities import percentage
from manyhands.core.terminal import plain, plain_lines
from manyhands.report.read import read_run
from manyhands.report.screen import Screen, ScreenProgress, epoch_line, evaluation_line, live_line, step_line
from manyhands.report.summary import duration, shorten


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


BOTH = pytest.mark.parametrize("stream", [io.StringIO, Terminal])


def on_screen(path, stream, **options):
    """A run that has begun, and a screen of it."""
    run = FakeRun(path)
    screen = Screen(path, stream=stream, clock=lambda: run.time, **options)
    return run.begin(), screen


def watched(path, stream, *, last=250, **options):
    """A run of some steps before a screen, with one update for each 50 steps."""
    run, screen = on_screen(path, stream, **options)
    for first in range(0, last, 50):
        run.train(first, first + 50)
        screen.update()
    for _ in range(2):
        run.event("warning", message="disk is \x1b[31mnearly\x1b[0m full\r\nfree some")
    screen.update()
    screen.close()
    return stream.getvalue()


def test_log_has_complete_plain_lines(tmp_path):
    text = watched(tmp_path, io.StringIO(), last=800)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING) "
    assert all(re.match(stamp, line) for line in text.splitlines())
    assert re.search(r"INFO epoch=\d+ step=\d+/100 loss=\d\.\d{3} acc=[\d.]+ img_s=\d+ data_pct=\d+\n", text)
    assert text.count("disk is nearly full | free some") == 1


def test_a_log_speaks_every_half_minute(tmp_path):
    run, screen = on_screen(tmp_path, stream := io.StringIO())
    for second in range(100):
        run.step(second % 99 + 1)
        run.time += 1 - 0.7  # a step takes as much
        screen.update()
    assert stream.getvalue().count("img_s=") == 3


@BOTH
def test_training_loss_of_each_epoch_is_shown_once(tmp_path, stream):
    """With the evaluation where one follows, else in a line of its own."""
    run, screen = on_screen(tmp_path, stream := stream())
    run.step(100, epoch_loss=1.25, epoch_top1=0.5)
    screen.update()
    run.evaluate(100)
    run.step(200, epoch_loss=0.75, epoch_top1=0.8)
    run.step(250)
    screen.update()
    run.step(300, epoch_loss=0.5, epoch_top1=0.9)
    screen.close()
    text = re.sub(r"train[ _]loss[ =]", "train ", plain(stream.getvalue()))
    assert [text.count(f"train {loss}") for loss in ("1.25", "0.75", "0.5")] == [1, 1, 1]
    lines = re.sub(r"\x1b\[[0-9;]*[a-zA-Z]|\r", "\n", stream.getvalue()).splitlines()
    assert [bool(re.search("top-?1.*1.25", line)) for line in lines if "1.25" in line] == [True]


def test_a_terminal_is_left_clean(tmp_path):
    text = watched(tmp_path, Terminal())
    assert "━" in text
    assert text.endswith(("\r\x1b[2K", "\n"))
    assert "\x1b[31m" not in text
    assert "\x1b[?25l" not in text, "the cursor is never hidden, so a killed launcher leaves a sound terminal"
    assert "epoch 1: top-1" in text


def test_colors_can_be_refused_and_forced(tmp_path, monkeypatch):
    for name, value, stream, moves, colored in (
        ("NO_COLOR", "1", Terminal, True, False),
        ("TERM", "dumb", Terminal, False, False),
        ("FORCE_COLOR", "1", io.StringIO, False, True),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            text = watched(tmp_path / name, stream())
        assert bool(re.search(r"\x1b\[[\d;]*[34]\dm", text)) == colored
        assert ("\x1b[2K" in text) == moves


SETUP = "data: digits, 10 classes: 0, 1\nnetwork: mlp, 5 parameters\ntraining: batch 64, processes 2, device cpu"


@BOTH
@pytest.mark.parametrize("quiet", [False, True])
def test_the_setup_is_shown_once_in_three_lines_or_in_one_before_the_warnings_of_a_start(tmp_path, stream, quiet):
    run, screen = on_screen(tmp_path, stream := stream(), quiet=quiet)
    run.event("warning", message="labels.csv isn't read")
    screen.update()
    assert "labels" not in stream.getvalue()
    for _ in range(2):  # the second comes from a restart
        run.event("setup", message=SETUP)
        run.event("note", message="says little")
        screen.update()
    screen.close()
    text = plain_lines(stream.getvalue().replace("\x1b[2K", "").replace("\r", "\n"))
    assert ("says little" in text) != quiet
    parts = [*([SETUP.replace("\n", " | ")] if quiet else SETUP.split("\n")), "labels.csv"]
    assert [text.count(part) for part in parts] == [1] * len(parts)
    shown = [line for line in text.splitlines() if any(part in line for part in parts)]
    assert all(part in line for part, line in zip(parts, shown, strict=True))


def test_a_session_shows_its_own_warnings_and_the_save_of_its_stop_in_any_encoding(tmp_path):
    run = FakeRun(tmp_path).begin().train(0, 200)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    Screen(tmp_path, stream=stream).close()
    assert stream.buffer.getvalue() == b""
    screen = Screen(tmp_path, stream=stream)
    run.save(100)
    run.event("warning", message="数据集")
    run.event("stopping", message="Ctrl-C: saving")
    run.save(150)
    screen.close()  # also where the start has failed before its setup
    text = stream.buffer.getvalue()
    assert all(words in text for words in (rb"\u6570", b"saved at step 150"))
    assert b"saved at step 100" not in text


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return read_run(FakeRun(tmp_path_factory.mktemp("run")).begin().train(0, 500).path).steps


@settings(max_examples=200)
@given(width=st.integers(1, 200), count=st.integers(0, 50), late=st.floats(0, 1e6), ascii_only=st.booleans())
def test_the_line_always_fits(steps, width, count, late, ascii_only):
    progress = ScreenProgress()
    for record in steps[:count]:
        progress.add_record(record)
    now = (progress.heard or 0.0) + late
    line = live_line(progress, now, width, ascii_only=ascii_only)
    assert cell_len(line.plain) <= width
    if ascii_only:
        assert line.plain.isascii()


def test_what_matters_most_stays_longest(steps):
    progress = ScreenProgress()
    for record in steps:
        progress.add_record(record)
    for width, words in ((48, "loss"), (60, "left"), (80, "img/s"), (120, "epoch 5/30")):
        assert words in live_line(progress, progress.heard, width).plain


@given(st.text(max_size=60), st.integers(3, 30))
def test_shortened_text_is_short(text, width):
    assert len(shorten(text, width)) == min(len(text), width)
    seconds = {"0s": 0, "1m00s": 59.6, "2h11m": 7860, "3d04h": 273600, "?": float("nan")}
    assert all(duration(one) == words for words, one in seconds.items())


@given(total=st.integers(1, 2_000_000), data=st.data(), digits=st.integers(0, 3))
def test_a_hundred_per_cent_is_all_and_nothing_else(total, data, digits):
    right = data.draw(st.one_of(st.integers(0, total), st.integers(max(0, total - 3), total)))
    shown = percentage(right / total, digits)
    assert (float(shown) == 100) == (right == total)
    assert abs(float(shown) - 100 * right / total) <= 10**-digits
    assert len(shown.partition(".")[2]) == digits


@pytest.mark.parametrize("right", [9999, 10000])
def test_a_figure_just_below_all_is_nowhere_shown_as_all(tmp_path, right):
    run = FakeRun(tmp_path).begin()
    run.train(0, 100)
    run.evaluate(100)
    read, share = read_run(tmp_path), right / 10000
    evaluation = read.evaluations[-1].model_copy(update={"top1": share, "top5": share})
    step = read.steps[-1].model_copy(update={"top1": share, "epoch_top1": share, "epoch_loss": 0.5})
    progress = ScreenProgress()
    progress.add_record(step)
    shown = [
        evaluation_line(evaluation, None), evaluation_line(evaluation, None, log=True),
        epoch_line(step), epoch_line(step, log=True),
        step_line(step), live_line(progress, step.time, 300).plain.partition("acc")[2],
        prediction_line(tmp_path, [("a", share)]),
    ]  # fmt: skip
    assert [bool(re.search(r"\b100(\.0+)?\b", line.replace("100/100", ""))) for line in shown] == [right == 10000] * 7
