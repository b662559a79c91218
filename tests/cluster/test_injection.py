"""Names and paths from a job or a user cannot become commands, options, settings, or markup: each trick is tried."""

import subprocess
from pathlib import Path

import pytest

from manyhands.cluster.agents.ssh import agent_command, agent_script, scp_command
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.hosts.this_process import machines_of
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError

TRICKS = [
    "$(touch executed)",
    "`touch executed`",
    "'; touch executed; '",
    '"; touch executed; "',
    "a\ntouch executed\n",
    "a & touch executed",
    "-oProxyCommand=touch executed",
    "~/$(touch executed)",
    "%h; touch executed",
]


def runs(words, folder):
    """Runs a command line as it stands; whether it did what a trick wanted."""
    subprocess.run(words, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=30, check=False)
    return (Path(folder) / "executed").exists()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_host_is_a_name_or_an_address(trick):
    for host in (trick, f"user@{trick}", f"ssh://{trick}:22"):
        with pytest.raises(UserError):
            machines_of(ClusterOptions(hosts=(host,)))


@pytest.mark.parametrize("trick", TRICKS)
def test_a_host_that_came_another_way_is_no_option_of_ssh(trick, tmp_path):
    """What follows `--` is a host to ssh, whatever it looks like."""
    try:
        command = agent_command(Machine(trick), ClusterOptions(ssh="echo"), tmp_path)
    except UserError:
        return
    assert command[command.index("--") + 1] == trick
    assert not runs(command, tmp_path)


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("setting", ["workdir", "python"])
def test_a_path_is_a_path_to_the_other_machines_shell(setting, trick, tmp_path):
    script = agent_script(ClusterOptions(**{setting: trick}), tmp_path)
    assert not runs(["sh", "-c", script], tmp_path)
    # On the way to the machine it stands on one line, for a csh.
    command = agent_command(Machine("n1"), ClusterOptions(**{setting: trick}), tmp_path)
    assert not runs(["sh", "-c", command[-1]], tmp_path)


@pytest.mark.parametrize("trick", TRICKS)
def test_proposed_commands_do_what_they_say(trick, tmp_path):
    line = scp_command(Machine("n1"), trick, trick)
    assert not runs(["sh", "-c", line.replace("scp", "echo", 1)], tmp_path)
    assert scp_command(Machine("ann@n1", port=31234), "/a/run", "runs/x") == "scp -r -P 31234 ann@n1:/a/run runs/x"
    assert scp_command(Machine("ann@fd00::7"), "/a/run", "runs/x") == "scp -r 'ann@[fd00::7]:/a/run' runs/x"
