"""Costs of collectives: laws that any of them keeps, and amounts as users write them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import UserError
from manyhands.core.mesh import make_mesh
from manyhands.core.quantities import parse_bandwidth, parse_memory, short_time
from manyhands.planner.links import mesh_links
from manyhands.sync.link_speeds import (
    LinkSpeed,
    fit_link_speed,
    link_seconds,
    link_through_ssh,
    sent_bytes,
    work_seconds,
)

kinds = st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
sizes, group = st.integers(1, 1 << 32), st.integers(1, 64)
links = st.builds(LinkSpeed, st.floats(1e5, 1e11), st.floats(0, 1e-2))


@given(kinds, group, group, sizes, sizes, links)
def test_more_bytes_and_more_processes_never_take_less_time(kind, few, more, small, large, link):
    (few, more), (small, large) = sorted((few, more)), sorted((small, large))
    assert link_seconds(kind, few, small, link) <= link_seconds(kind, more, large, link) * (1 + 1e-12)
    assert link_seconds(kind, 1, large, link) == sent_bytes(kind, 1, large) == 0
    # ssh never speeds a link up, and work is within the time.
    assert more == 1 or link_seconds(kind, more, large, link) < link_seconds(kind, more, large, link_through_ssh(link))
    working = replace(link, work_s_per_byte=1 / link.bytes_per_s, work_s_per_message=link.latency_s / 10)
    assert work_seconds(kind, more, large, link) == 0
    assert more == 1 or 0 < work_seconds(kind, more, large, working) <= link_seconds(kind, more, large, working)


@given(group, sizes, links)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(processes, size, link):
    halves = [link_seconds(kind, processes, size, link) for kind in ("reduce_scatter", "all_gather")]
    assert link_seconds("all_reduce", processes, size, link) == pytest.approx(sum(halves))
    assert sent_bytes("all_reduce", processes, size) == pytest.approx(2 * size * (processes - 1) / processes)


@given(kinds, st.integers(2, 64), links, st.integers(1, 1000))
def test_a_link_is_found_again_from_its_points(kind, processes, link, small):
    points = tuple((float(size), link_seconds(kind, processes, size, link)) for size in (small, 10_000, 10_000_000_000))
    found = fit_link_speed(kind, processes, points)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-3, abs=1e-7)


def test_points_that_fall_give_a_link_without_latency():
    assert fit_link_speed("all_gather", 2, ((1.0, 3.0), (100.0, 2.0))) == LinkSpeed(25.0, 0.0)
    with pytest.raises(ValueError, match="can't compute a link speed"):
        fit_link_speed("all_gather", 1, ((1.0, 3.0),))


def test_inner_axes_lie_within_a_machine():
    mesh = make_mesh({"dp": 4, "tp": 2})
    within, between = LinkSpeed(1e10, 0), LinkSpeed(1e8, 0)
    one = mesh_links(mesh, None, within, between)
    assert one.across == (False, False)
    pairs = mesh_links(mesh, 2, within, between)
    assert pairs.across == (True, False)
    assert pairs.seconds("all_reduce", (1,), 1e8) == pytest.approx(1e8 / 1e10)
    # Two groups leave each machine at once; the group over all leaves it once.
    assert pairs.seconds("all_reduce", (0,), 1e8) == pytest.approx(2 * 3 / 4 * 1e8 / (1e8 / 2))
    assert pairs.seconds("all_reduce", (0, 1), 1e8) == pytest.approx(2 * 7 / 8 * 1e8 / 1e8)
    # With three to a machine a pair lies on two machines.
    assert mesh_links(mesh, 3, within, between).across == (True, True)
    assert mesh_links(mesh, 4, within, between).across == (True, False)
    assert mesh_links(mesh, 1, within, between).across == (True, True)


def test_amounts():
    rates = {"1gbit": 125e6, "10 mbit": 1.25e6, "100Mbit/s": 12.5e6, "100mbits": 12.5e6, "8GB/s": 8e9}
    rates["1.5GiB/s"] = 1.5 * 2**30
    sizes = {"14GiB": 14 << 30, "500MB": 500_000_000, "2 kib": 2048, "77": 77}
    times = {4.5e-4: "0.45 ms", 0.00999: "10 ms", 0.75: "750 ms", 0.9996: "1 s", 1.034: "1.03 s", 20000: "20,000 s"}
    for convert, expected in ((parse_bandwidth, rates), (parse_memory, sizes), (short_time, times)):
        assert {given: convert(given) for given in expected} == expected
    for text in ("", "fast", "8gb", "8Gb/s", "0gbit", "-1gbit", "1e9", "12", "1 furlong"):
        with pytest.raises(UserError, match="not a link speed"):
            parse_bandwidth(text)
    for text in ("", "much", "0GiB", "-1GiB", "1gbit", "14G"):
        with pytest.raises(UserError, match="not an amount"):
            parse_memory(text)
