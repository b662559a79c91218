"""A healthy cluster as facts, for tests to plant one fault in."""

from manyhands.cluster.doctor.findings import Attempt, DoctorFinding, Needs, Survey
from manyhands.cluster.doctor.survey import choose_addresses

GIB = 1 << 30


def machine(number, **changes):
    """What gather_facts() would say on a healthy machine."""
    place = {"path": "/job", "exists": True, "size": 100 * GIB, "free": 50 * GIB, "writable": True}
    network = [{"address": f"10.0.0.{number}", "prefix": 24}, {"address": "fe80::1", "prefix": 64}]
    facts = {
        "time": 1e9,
        "name": {"host": f"n{number}", "addresses": [f"10.0.0.{number}"]},
        "interfaces": [
            {"name": "lo", "up": True, "speed_mbps": 0, "addresses": [{"address": "127.0.0.1", "prefix": 8}]},
            {"name": "eth0", "up": True, "speed_mbps": 1000, "addresses": network},
        ],
        "default_interface": "eth0",
        "firewall": [],
        "python": {"version": "3.11.7", "path": "/usr/bin/python3"},
        "versions": {"manyhands": "0.1.0", "torch": "2.15.0", "torchvision": "0.29.2", "numpy": "2.4.6",
                     "nccl": "2.30.7"},
        "compiler": True,
        "package": "aaaa",
        "drivers": {},
        "accelerators": [],
        "cores": 8.0,
        "load": 0.2,
        "memory": {"total": 32 * GIB, "free": 30 * GIB},
        "places": {"shm": place | {"path": "/dev/shm"}, "work folder": place, "run folder": place},
        "jobs": [],
        "code": {"exists": True, "path": "/job", "hash": "c0de", "files": {"net.py": "aa", "job.toml": "bb"},
                 "whole": True, "revision": "abc"},
        "data": {"kind": "folder", "path": "/data", "exists": True, "files": 10, "bytes": 1000, "hash": "da7a",
                 "whole": True},
        "machine": f"n{number} 0123",
        "user": "ada",
        "open_files": 20000,
        "environment": {},
        "errors": {},
    }  # fmt: skip
    return facts | changes


def gpu(index=0, **changes):
    return {"kind": "cuda", "index": index, "name": "H200", "memory_mib": 143000, "used_mib": 4, "busy_percent": 0,
            "processes": []} | changes  # fmt: skip


def healthy(count=3, needs=None):
    """A survey without any fault."""
    hosts = tuple(f"n{number}" for number in range(1, count + 1))
    pairs = [(one, two) for one in hosts for two in hosts if one != two]
    survey = Survey(hosts, {host: machine(int(host[1:])) for host in hosts}, needs=needs or Needs())
    survey.reach = {(one, two): (Attempt(f"10.0.0.{two[1:]}", "ok", "10.0.0.9", 0.2, 40000),) for one, two in pairs}
    survey.chosen = choose_addresses(survey.facts, survey.reach)
    survey.mbps = dict.fromkeys(pairs, 941.0)
    survey.latency_ms = dict.fromkeys(pairs, 0.2)
    survey.clock_s = dict.fromkeys(hosts, (0.001, 0.002))
    survey.collective = DoctorFinding("collective", "ok", hosts, "an all-reduce took 1.0 s", cause="collective")
    return survey


def change(survey, host, path, value):
    """Plants one fact."""
    *above, last = path.split("/")
    place = survey.facts[host]
    for key in above:
        place[key] = dict(place[key])
        place = place[key]
    place[last] = value
