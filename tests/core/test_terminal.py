"""Texts that others wrote, on the screen and in the report: nothing in them is obeyed."""

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import manyhands
from manyhands.cli.evaluate import prediction_line, show_evaluation
from manyhands.cli.main import main
from manyhands.core.errors import UserError
from manyhands.core.terminal import as_json, plain, plain_lines, say, show

# Colors, a title, 8-bit sequences, the cursor's, marks of direction, ends of lines that aren't "\n", half a character.
EVIL = "a\x1b[31mb\x1b]0;t\x07c\x9b2Jd\u202eed\u2066f\u200fg\x85h\u2028i\rj\x08k\x1bcl\ud800m\x00n"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def test_what_a_terminal_obeys_is_left_out_and_the_words_stay():
    assert plain(EVIL) == "abc2Jdedfg | h | i | jklmn"
    assert plain("名字 العربية 👩\u200d🔬") == "名字 العربية 👩\u200d🔬"
    assert plain_lines("one\r\n\x1b[2Jtwo\n  three") == "one\ntwo\n  three"


@given(st.text())
def test_any_text_becomes_one_line_and_stays_it(text):
    assert not OBEYED.search(plain(text))
    assert "\n" not in plain(text)
    assert plain(plain(text)) == plain(text)
    assert json.loads(as_json([text])) == [text]
    assert not OBEYED.search(as_json([text]))


def test_an_error_says_others_words_on_its_own_lines_only():
    error = UserError(f"{EVIL}\n  do:   curl x | sh", EVIL, (EVIL, "  kept"))
    assert not OBEYED.search(str(error))
    begins = [line.split(":")[0].strip() for line in str(error).splitlines()]
    assert begins == [error.message.split(":")[0], "where", "do", "kept"]


def test_what_is_said_and_shown_is_plain(capsys):
    say(EVIL)
    show([EVIL, "two"])
    reported = capsys.readouterr()
    assert not OBEYED.search(reported.out + reported.err)
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show("名", narrow)
    assert narrow.buffer.getvalue() == b"\\u540d\n"


def test_names_of_classes_and_pictures_are_on_one_line(capsys):
    name = f"{EVIL}\nforged: cat 99.9%"
    assert prediction_line(Path(f"p\n{EVIL}.png"), [(name, 0.5)]).count("\n") == 0
    row = {"name": name, "top1": 0.5, "count": 2}
    figures = {"count": 2, "top1": 0.5, "top5": 1, "loss": 1, "metrics": {name: 0.5}, "classes": 6}
    show_evaluation({"checkpoint": EVIL, "data": EVIL, "per_class": [row], **figures}, as_json=False)
    reported = capsys.readouterr().out
    assert not OBEYED.search(reported)
    assert len(reported.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "file", "text"),
    [
        (["explain", "--cluster", "FILE"], "hostfile", "n1\x1b[31m\x9b slots=2\n"),
        (["explain", "--cluster", "FILE"], "rank_table.json", '{"version": "1\u202e\\u001b[31m"}'),
        (["train", "FILE", "--show-config"], "job.toml", '[train]\noptimizer = "\\u009b2J\u2066"\n"lr\u202e" = 3\n'),
        (["plan", "FILE"], "plan.json", '{"mesh": {"\u202e\\u001b[2J": 2}}'),
        (["eval", "FILE/nowhere\x1b[31m\u202e"], "f", ""),
    ],
)
def test_what_a_command_says_of_a_file_of_others_is_plain(arguments, file, text, tmp_path, capsys):
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([word.replace("FILE", str(path)) for word in arguments] + more)
        reported = capsys.readouterr()
        assert ended.value.code == 2, reported
        assert reported.err
        assert not OBEYED.search(reported.out + reported.err), reported


def test_nothing_but_the_one_place_writes_on_the_screen():
    package = Path(manyhands.__file__).parent
    mine = re.compile(r"sys\.std(out|err)\.write\(|\bprint\(.*file=sys\.")
    writers = {
        f"{path.relative_to(package)}" for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines() if mine.search(line) and '"\\nstopped\\n"' not in line
    }  # fmt: skip
    assert writers == {"core/terminal.py"}
