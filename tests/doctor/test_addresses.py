"""Which ways are tried and measured, and which address each machine gets: one that all the others did reach."""

import ipaddress

from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.cluster.doctor import survey
from manyhands.cluster.doctor.findings import Attempt

NAMES = ("eth0", "eno1", "enp3s0", "docker0", "br-1a2b", "wg0", "tailscale0", "virbr0", "ib0", "lo")
HOSTS = ("a", "b", "c", "d")


def interface(name, *addresses, up=True, speed=0):
    split = (each.split("/") for each in addresses)
    entries = [{"address": address, "prefix": int(prefix)} for address, prefix in split]
    return {"name": name, "up": up, "speed_mbps": speed, "addresses": entries}


addresses = st.one_of(
    st.builds("10.0.{}.{}/24".format, st.integers(0, 1), st.integers(1, 254)),
    st.builds("8.1.{}.{}/20".format, st.integers(0, 255), st.integers(1, 254)),
    st.builds("fd00:{:x}::{:x}/64".format, st.integers(0, 1), st.integers(1, 254)),
    st.sampled_from(["127.0.0.1/8", "::1/128", "fe80::1/64"]),
)
speeds = st.sampled_from([0, 1000, 10_000])
made = st.builds(interface, st.sampled_from(NAMES), addresses, addresses, up=st.booleans(), speed=speeds)
interfaces = st.lists(made, max_size=4, unique_by=lambda one: one["name"])


def reached(facts, result=lambda: "ok"):
    """For each ordered pair what became of the attempts at each address."""
    pairs = [(one, two) for one in facts for two in facts if one != two]
    return {
        pair: tuple(Attempt(address, result()) for address in survey.local_candidates(facts[pair[1]])) for pair in pairs
    }


@st.composite
def clusters(draw):
    """Facts, and for each ordered pair what became of each attempt."""
    facts = {host: {"interfaces": draw(interfaces)} for host in HOSTS[: draw(st.integers(1, 4))]}
    results = st.sampled_from(["ok", "ok", "ok", "refused", "timeout", "other"])
    return facts, reached(facts, lambda: draw(results))


def reached_by_all(facts, reach, host):
    """A machine's addresses that every other one reached."""
    others = [reach[other, host] for other in facts if other != host]
    own = survey.local_candidates(facts[host])
    return [a for a in own if all(any(t.address == a and t.result == "ok" for t in tries) for tries in others)]


def addresses_on(interface):
    return {str(ipaddress.ip_address(entry["address"])) for entry in interface["addresses"]}


ON_TWO = {"interfaces": [interface("docker0", "10.0.0.1/24"), interface("eth0", "10.0.0.1/24")]}


@given(clusters())
@example(({"a": ON_TWO}, {}))  # one address on two interfaces
def test_the_chosen_address_is_the_machines_own_reached_by_all_and_the_best_of_these(cluster):
    """IPv4 where all have it; bridges of containers only where nothing else works; whatever the machines' order is."""
    facts, reach = cluster
    chosen = survey.choose_addresses(facts, reach)
    assert survey.choose_addresses(dict(reversed(facts.items())), reach) == chosen
    usable = {host: found for host in facts if (found := reached_by_all(facts, reach, host))}
    assert set(chosen) == set(usable)
    fours = all(any("." in address for address in found) for found in usable.values())
    sixes = all(any(":" in address for address in found) for found in usable.values())
    for host, (name, address) in chosen.items():
        assert address in usable[host]
        assert not ipaddress.ip_address(address).is_loopback
        on = [one for one in facts[host]["interfaces"] if one["up"]]
        assert any(one["name"] == name and address in addresses_on(one) for one in on)
        assert ("." in address) == fours or (not fours and not sixes)
        alike = {a for a in usable[host] if (":" in a) == (":" in address)}
        assert survey.link_penalty(name) == min(
            survey.link_penalty(one["name"]) for one in on if alike & addresses_on(one)
        )


def test_the_subnet_that_all_share_wins_over_a_faster_interface_of_one_and_private_over_public():
    shared = {host: interface("eth0", f"10.0.0.{number}/24") for number, host in enumerate("abc", 1)}
    facts = {host: {"interfaces": [shared[host]]} for host in "abc"}
    facts["a"]["interfaces"].insert(0, interface("eth2", "8.8.8.1/24"))
    facts["b"]["interfaces"].insert(0, interface("eth1", "10.9.0.1/24", speed=100_000))
    facts["c"]["interfaces"].insert(0, interface("eth2", "8.8.8.3/24"))
    chosen = {"a": ("eth0", "10.0.0.1"), "b": ("eth0", "10.0.0.2"), "c": ("eth0", "10.0.0.3")}
    assert survey.choose_addresses(facts, reached(facts)) == chosen
    del facts["b"]
    assert survey.choose_addresses(facts, reached(facts)) == {host: chosen[host] for host in "ac"}


hosts = st.integers(0, 20).map(lambda count: [f"n{number}" for number in range(count)])


@given(hosts, st.integers(0, 8))
def test_each_ordered_pair_meets_once_nobody_is_in_two_pairs_of_a_round_and_rounds_are_few(names, most):
    met = [pair for pairs in survey.pair_rounds(names) for pair in pairs]
    assert sorted(met) == sorted((one, two) for one in names for two in names if one != two)
    played = survey.pair_rounds(names, most)
    assert len(played) <= (most or 2 * len(names))
    assert all(played)
    for pairs in played:
        seated = [name for pair in pairs for name in pair]
        assert len(seated) == len(set(seated))


@settings(max_examples=12)
@given(st.integers(1, 150))
@example(survey.MOST_TRIED // 2)
@example(survey.MOST_TRIED + 2)
def test_machines_try_all_others_or_of_many_some_and_the_first(count):
    """A thousand machines don't try a million ways; what is measured was tried; what holds all together is."""
    names = [f"n{number}" for number in range(count)]
    tried = survey.connections_to_try(names)
    pairs = {(host, other) for host, others in tried.items() for other in others}
    assert list(tried) == names
    assert all(len(others) == len(set(others) - {host}) for host, others in tried.items())
    assert all(len(others) <= min(count - 1, survey.MOST_TRIED) for others in tried.values())
    assert {(host, names[0]) for host in names[1:]} <= pairs
    assert {pair for pairs in survey.pair_rounds(names, survey.MOST_ROUNDS) for pair in pairs} <= pairs
    reached = {name: sum(other == name for _, other in pairs) for name in names}
    assert all(times >= min(count - 1, survey.MOST_TRIED // 2 - 1) for times in reached.values())
    if count <= survey.MOST_TRIED // 2:
        assert len(pairs) == count * (count - 1)
