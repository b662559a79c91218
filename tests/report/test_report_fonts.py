"""Letters of class names: a font that has them where one is installed, else the report says so."""

import dataclasses

import pytest
from fake_run import complete

from manyhands.report import drawing, page
from manyhands.report.drawing import fonts_for
from manyhands.report.page import write_report


def test_plain_letters_need_one_font():
    assert fonts_for(["cat", "Löwe", ""]) == (["DejaVu Sans"], "")


def test_chinese_letters_get_a_font_that_has_them():
    found, missing = fonts_for(["猫", "长颈鹿（幼年）"])
    if missing:
        pytest.skip("NOT SHOWN that Chinese names are drawn: no font here has them")
    assert len(found) > 1


def test_the_font_of_boxes_has_no_letters():
    """Matplotlib brings a font with a box for every letter of Unicode, which is no font that has them."""
    assert [name for name in fonts_for(["𒀀"])[0] if "Last Resort" in name] == []


@pytest.mark.slow
def test_letters_that_no_font_has_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drawing, "_installed_fonts", list)
    assert fonts_for(["a猫狗a"]) == (["DejaVu Sans"], "狗猫")
    run = complete(tmp_path / "run")
    read = page.read.read_run

    def names(path):
        found = read(path)
        classes = ["猫", *found.best.classes[1:]]
        return dataclasses.replace(found, best=found.best.model_copy(update={"classes": classes}))

    monkeypatch.setattr(page.read, "read_run", names)
    text = write_report(getattr(run, "path", run)).read_text()
    assert "no font on this machine has 猫" in text
    assert "no font on this machine has 猫" in capsys.readouterr().err
