"""Every text that users read stands in one catalogue, and it is spoken wherever texts are shown."""

import re
import sys
from html import unescape

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import catalogue
from manyhands.core.errors import EXIT_USAGE
from tests.docs.pages import ROOT
from tests.e2e.command import run

TEMPLATE = ROOT / "src/manyhands/locale/manyhands.pot"
VALUES = st.from_regex(r"[0-9]{1,4}|/[a-z0-9]{1,8}/[0-9a-f]{4}", fullmatch=True)
JOB = ("digits", "mlp", "--epochs", "1", "--device", "cpu", "--set", "train.max_steps=3")


def scripts(name):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A language in which every text is the English one in brackets, behind a number of its own."""
    with TEMPLATE.open("rb") as file:
        texts = read_po(file)
    for number, message in enumerate(texts):
        if message.id:
            message.string = f"⟦{number}:{message.id}⟧"
    path = tmp_path_factory.mktemp("language") / "numbered.mo"
    with path.open("wb") as file:
        write_mo(file, texts)
    return path


def without_brackets(text):
    return re.sub(r"⟦\d+:|⟧", "", text)


def untranslated(text):
    """The lines with words of which no text of the catalogue is a part, but for matplotlib's on a slow machine."""
    ours = [line for line in text.splitlines() if not line.startswith("Matplotlib is building the font cache")]
    return [line for line in ours if re.search(r"[a-z]{3,} [a-z]{3,}", line) and "⟦" not in line]


def test_the_catalogue_is_up_to_date():
    made = scripts("build_catalogue").catalogue()
    assert TEMPLATE.read_text(encoding="utf-8") == made, "run scripts/build_catalogue.py"


def test_a_text_is_found_by_its_fixed_words_whatever_its_values(numbered, monkeypatch):
    monkeypatch.setenv(catalogue.LANGUAGE, str(numbered))
    texts = catalogue.read_catalogue(str(numbered))
    assert len(texts.keys) > 1000

    @settings(max_examples=300)
    @given(st.data())
    def law(data):
        key = data.draw(st.sampled_from(texts.keys))
        values = {name: data.draw(VALUES) for name in key.names}
        said = key.target.format(**values)
        text = without_brackets(said)
        # With these very values it may be a text of its own: "at step 0" beside "at step {step}".
        assert catalogue.translated(text) == texts.whole.get(text, said)

    law()


def test_what_is_not_ours_stays_as_it_is(numbered, monkeypatch):
    monkeypatch.setenv(catalogue.LANGUAGE, str(numbered))
    for text in ("", "猫", "a name of somebody's own", "  \n", "{not} a {form", "1840"):
        assert catalogue.translated(text) == text


@pytest.mark.parametrize("said", ["no values", "{other}", "{path} {path.name}"])
def test_a_translation_has_the_values_of_its_text(tmp_path, said):
    with TEMPLATE.open("rb") as file:
        texts = read_po(file)
    texts["{path} is a folder"].string = said
    with (tmp_path / "wrong.mo").open("wb") as file:
        write_mo(file, texts)
    with pytest.raises(ValueError, match="has other values than"):
        catalogue.read_catalogue(str(tmp_path / "wrong.mo"))


@pytest.mark.parametrize(
    "text", ["{} of {}", "{0} of {1}", "{a.b} of all", "{a[0]} of all", "{a:d} of all", "{a!x} of"]
)
def test_a_catalogue_of_another_program_s_is_refused_and_not_when_something_is_shown(tmp_path, text):
    texts = Catalog()
    texts.add(text, text)
    with (tmp_path / "other.mo").open("wb") as file:
        write_mo(file, texts)
    with pytest.raises(ValueError, match=r"is no catalogue|nvalid|nknown"):
        catalogue.read_catalogue(str(tmp_path / "other.mo"))


@pytest.mark.slow
def test_commands_speak_it_and_records_stay_as_they_were(numbered, here):
    def one(*arguments):
        ended = run(*arguments, MANYHANDS_LANG=str(numbered))
        assert not untranslated(ended.out), ended.out
        assert not untranslated(ended.err), ended.err
        assert "⟦" in ended.out + ended.err
        return ended

    assert one("train", *JOB, "--out", "runs/one").code == 0
    assert one("eval", "runs/one").code == 0
    assert one("train", "nowhere").code == EXIT_USAGE
    assert one("train", "digits", "nomodel").code == EXIT_USAGE
    one("doctor")
    one("clean")
    one("explain")
    assert run("train", *JOB, "--out", "runs/two").code == 0
    one_run, two = here / "runs/one", here / "runs/two"
    for name in ("events.jsonl", "metrics.jsonl", "plan.json", "job.toml"):
        assert "⟦" not in (one_run / name).read_text(encoding="utf-8")
    page = (one_run / "report.html").read_text(encoding="utf-8")
    nodes = [unescape(text) for text in re.findall(r">([^<>]+)<", re.sub(r"(?s)<style>.*?</style>", "", page))]
    assert sum("⟦" in text for text in nodes) > 20
    english = (two / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", without_brackets(page)) == re.findall(r"<h2>(.*?)</h2>", english)


def test_what_programs_read_is_in_no_language(numbered, here):
    (here / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    for command in (
        ("convert-cluster", "hosts", "--to", "torchrun"),
        ("schema",),
        ("train", *JOB, "--show-config"),
        ("explain", "--json"),
        ("ps", "--json"),
    ):
        spoken, english = run(*command, MANYHANDS_LANG=str(numbered)), run(*command)
        assert (spoken.code, spoken.out) == (english.code, english.out)


@pytest.mark.parametrize("language", ["xx", "../../../etc", "broken.mo", "nowhere.mo"])
def test_a_language_that_is_not_there_is_one_screen(here, language):
    (here / "broken.mo").write_bytes(b"\xde\x12\x04\x95" + b"\xff" * 40)
    ended = run("ps", MANYHANDS_LANG=language)
    assert ended.code == EXIT_USAGE
    assert "where: MANYHANDS_LANG" in ended.err
    assert "do:" in ended.err
    assert "Traceback" not in ended.err
