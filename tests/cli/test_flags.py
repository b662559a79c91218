"""Flags of the commands: whole numbers stay whole, and every flag sets an option that exists."""

import re

import pytest

from manyhands.cli.flags import Key
from manyhands.cli.main import COMMANDS, main, make_app
from manyhands.config.load import known_keys

NEEDED = {"logs": ["run"], "eval": ["run"], "predict": ["run", "a.png"], "resume": ["run"], "pack": ["folder"]}
APP = make_app()
ARGUMENTS = [
    (name, each) for name in COMMANDS if name != "checkpoint" for each in APP[name].assemble_argument_collection()
]
WHOLE = [(command, each.name) for command, each in ARGUMENTS if re.search(r"\bint\b", str(each.field_info.annotation))]


@pytest.mark.parametrize("words", [("train", "digits"), ("launch", "digits", "--hosts", "n1,n2"), ("imagenet",)])
def test_sync_is_a_flag(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--sync", "powersgd", "--show-config"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    section = shown[shown.index("[sync]") :]
    assert section.splitlines()[1].startswith('method = "powersgd"'), section
    assert "flag" in section.splitlines()[1]


def test_integer_flags_are_found():
    assert {("train", "--epochs"), ("resume", "--epochs"), ("imagenet", "-b"), ("logs", "--last")} <= {*WHOLE}


@pytest.mark.parametrize(("command", "flag"), WHOLE)
def test_fraction_is_refused_if_an_integer_is_expected(command, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, *NEEDED.get(command, []), flag, "1.5"])
    assert ended.value.code == 2
    assert '"1.5" is not a whole number' in capsys.readouterr().err


def test_every_flag_that_sets_an_option_sets_one_that_exists():
    metadata = [
        each for _, argument in ARGUMENTS for each in getattr(argument.field_info.annotation, "__metadata__", ())
    ]
    keys = {each for each in metadata if isinstance(each, Key)}
    assert len(keys) > 30
    assert keys <= {*known_keys()}


def test_the_page_of_help_of_a_command_shows_all_that_its_function_says(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "manyhands plan plan.json --verify --measure" in capsys.readouterr().out
