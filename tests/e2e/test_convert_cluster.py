"""manyhands convert-cluster, as its users type it."""

import subprocess
import sys

import pytest

from manyhands.cli.main import main
from tests.e2e.command import environment

HOSTS = "n1 slots=8\nann@n2 slots=8\n"


def _run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert-cluster", *arguments])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["rank_table", "rank-table", "hostfile", "torchrun", "msrun", "accelerate", "launch.json"]
)
def test_there_and_back(name, hosts, capsys):
    code, out, err = _run(["hosts", "--to", name], capsys)
    assert code == 0
    assert "ann" in out or "note: " in err
    (hosts / "written").write_text(out)
    code, out, err = _run(["written", "--to", "hostfile"], capsys)
    if name == "accelerate":
        assert (code, out) == (2, "")
        assert "no place" in err or "name" in err
    else:
        assert (code, sum(int(line.partition("=")[2]) for line in out.splitlines())) == (0, 16)


def test_a_pipe_of_two(hosts):
    line = (
        f"{sys.executable} -m manyhands convert-cluster hosts --to torchrun"
        f" | {sys.executable} -m manyhands convert-cluster - --to hostfile"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stdout) == (0, HOSTS)


def test_no_file_is_overwritten(hosts, capsys):
    code, out, _ = _run(["hosts", "--to", "hostfile", "--out", "again"], capsys)
    assert (code, out, (hosts / "again").read_text()) == (0, "", HOSTS)
    code, _, err = _run(["hosts", "--to", "torchrun", "--out", "again"], capsys)
    assert code == 2
    assert "again is there already" in err
    assert (hosts / "again").read_text() == HOSTS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hosts", "--to", "hostfle"], 'did you mean "hostfile"?'),
        (["nowhere", "--to", "hostfile"], "nowhere can't be read"),
        (["hosts", "--to", "hostfile", "--from", "torchrun"], "there is no torchrun command in it"),
        (["hosts", "--to", "hostfile", "--out", "no/such/folder"], "can't be written"),
        (["empty", "--to", "hostfile"], "this file is empty"),
        (["hosts"], "--to"),
    ],
)
def test_mistakes_are_one_screen(arguments, said, hosts, capsys):
    (hosts / "empty").write_text("")
    code, out, err = _run(arguments, capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_it_needs_no_torch():
    code = (
        "from manyhands.cli.main import main\nimport sys\n"
        "try:\n    main(['convert-cluster', '-', '--to', 'rank_table'])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="n1 slots=8\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
