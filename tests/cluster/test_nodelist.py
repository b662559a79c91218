"""Slurm's short lists mean what Slurm says they mean."""

import contextlib
import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.hosts.formats.slurm import expand_counts, expand_hosts
from manyhands.core.errors import UserError

WORD = st.from_regex(r"[a-z][a-z.-]{0,3}", fullmatch=True)


@st.composite
def _ranges(draw):
    """A bracket as it is written, and the numbers that it means."""
    written, meant = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, length = draw(st.integers(0, 120)), draw(st.integers(0, 5))
        width = draw(st.integers(1, 4))
        numbers = [str(number).zfill(width) for number in range(low, low + length + 1)]
        written.append(f"{numbers[0]}-{numbers[-1]}" if length else numbers[0])
        meant += [str(number).zfill(len(numbers[0])) for number in range(low, low + length + 1)]
    return f"[{','.join(written)}]", meant


@st.composite
def _entries(draw):
    """One entry: a word, then brackets and words, at most two brackets; and the hosts that it means."""
    text = draw(WORD)
    hosts = [text]
    for _ in range(draw(st.integers(0, 2))):
        bracket, numbers = draw(_ranges())
        word = draw(st.one_of(st.just(""), WORD))
        text += bracket + word
        hosts = [host + number + word for host in hosts for number in numbers]
    return text, hosts


@given(st.lists(_entries(), min_size=1, max_size=4))
def test_a_list_is_all_that_its_entries_mean_in_order(entries):
    text = ",".join(written for written, _ in entries)
    assert expand_hosts(text, "SLURM_NODELIST") == [host for _, hosts in entries for host in hosts]


@given(st.text("ab[]-,0123 ", max_size=12))
def test_any_text_is_a_list_or_a_users_mistake(text):
    hosts = []
    with contextlib.suppress(UserError):
        hosts = expand_hosts(text, "SLURM_NODELIST")
        assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1", "a]", "a,,b", "a[3-1]", "a[x]", "a[]", "a[1-]", "a b", "a[0-9999999]"]
)
def test_broken_lists_are_refused(text):
    with pytest.raises(UserError, match="SLURM_NODELIST"):
        expand_hosts(text, "SLURM_NODELIST")


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's own scontrol is not installed")
@settings(max_examples=20)
@given(entry=_entries().filter(lambda entry: entry[0][-1] == "]" or "[" not in entry[0]))
def test_scontrol_agrees(entry, tmp_path):
    text, hosts = entry
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    variables = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    command = ["scontrol", "show", "hostnames", text]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    assert sorted(told.stdout.split()) == sorted(hosts)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_counts_are_repeated(pairs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text, "SLURM_TASKS_PER_NODE") == [count for count, times in pairs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x", "2x3", "-1", "2(x3),", "a", "2(x9999999)"])
def test_broken_counts_are_refused(text):
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        expand_counts(text, "SLURM_TASKS_PER_NODE")
