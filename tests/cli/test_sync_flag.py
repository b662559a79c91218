"""`--sync` is a flag of every command that trains or plans."""

import pytest

from manyhands.cli.main import main


@pytest.mark.parametrize("words", [("train", "digits"), ("launch", "digits", "--hosts", "n1,n2"), ("imagenet",)])
def test_sync_is_a_flag(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--sync", "powersgd", "--show-config"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    section = shown[shown.index("[sync]") :]
    assert section.splitlines()[1].startswith('method = "powersgd"'), section
    assert "flag" in section.splitlines()[1]
