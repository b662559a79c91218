"""Interfaces, the machine's own name, and what its firewall says."""

import os
import shutil
import socket
import subprocess
from ipaddress import IPv6Address, ip_network
from pathlib import Path
from typing import Any

import psutil

MOST_RULES = 200


def own_name() -> dict[str, Any]:
    """The host's name and the addresses that it resolves to here."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"host": name, "addresses": [], "error": str(error)}
    return {"host": name, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found))}


def interfaces() -> list[dict[str, Any]]:
    """Every interface with its addresses, whether it is up, its speed and largest packet."""
    states, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        addresses = [
            {"address": entry.address.partition("%")[0], "prefix": _prefix(entry.netmask, entry.family)}
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        found.append(
            {
                "name": name,
                "up": bool(state and state.isup),
                "speed_mbps": state.speed if state else 0,
                "mtu": state.mtu if state else 0,
                "addresses": addresses,
            }
        )
    return found


def _prefix(netmask: str | None, family: int) -> int:
    if not netmask:
        return 32 if family == socket.AF_INET else 128
    if family == socket.AF_INET6:
        return int(IPv6Address(netmask)).bit_count()
    return ip_network(f"0.0.0.0/{netmask}").prefixlen


def default_interface() -> str:
    """The interface of the default route; empty where there is none, or where the system doesn't tell it."""
    best: tuple[int, str] | None = None
    routes = Path("/proc/net/route")
    for line in routes.read_text().splitlines()[1:] if routes.exists() else ():
        words = line.split()
        if words[1] == words[7] == "00000000" and (best is None or int(words[6]) < best[0]):
            best = (int(words[6]), words[0])
    return best[1] if best else _default_interface_6()


def _default_interface_6() -> str:
    routes, best = Path("/proc/net/ipv6_route"), None
    for line in routes.read_text().splitlines() if routes.exists() else ():
        words = line.split()
        if words[0] == "0" * 32 and words[1] == "00" and words[9] != "lo":
            metric = int(words[5], 16)
            best = min(best, (metric, words[9])) if best else (metric, words[9])
    return best[1] if best else ""


def firewall_rules() -> list[str]:
    """The rules that turn something away, as far as this user may read them; only root may."""
    if os.name != "posix" or os.geteuid() != 0:
        return []
    rules: list[str] = []
    for command in (["nft", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"]):
        if not shutil.which(command[0]):
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3)
        rules += [line.strip() for line in done.stdout.splitlines() if _turns_away(line)]
    return rules[:MOST_RULES]


def _turns_away(line: str) -> bool:
    words = line.lower().replace(";", " ").split()
    return bool({"drop", "reject"} & set(words)) or line.startswith((":INPUT DROP", ":OUTPUT DROP"))
