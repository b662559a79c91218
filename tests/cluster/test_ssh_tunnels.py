"""Connections that carry forwards, with a command of our own in the place of ssh."""

import time

import psutil

from manyhands.cluster.agents import tunnel
from manyhands.cluster.agents.switchboard import READY
from manyhands.cluster.agents.tunnel import SshTunnels
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import ClusterOptions


def test_a_connection_that_does_not_end_when_it_is_told_to_is_killed(tmp_path, monkeypatch):
    deaf = tmp_path / "ssh"
    deaf.write_text(f"#!/bin/sh\ntrap '' TERM\necho {READY}\nwhile :; do sleep 0.1; done\n")
    deaf.chmod(0o700)
    monkeypatch.setattr(tunnel, "TUNNEL_CLOSE_S", 0.3)
    before = set(psutil.Process().children())
    tunnels = SshTunnels([Machine("n1"), Machine("n2")], ClusterOptions(ssh=str(deaf)), tmp_path, lambda: None)
    began = time.monotonic()
    tunnels.close()
    assert time.monotonic() - began < 10
    assert set(psutil.Process().children()) == before
