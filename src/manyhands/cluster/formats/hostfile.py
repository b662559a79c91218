"""Interim."""

from manyhands.cluster.inventory import Cluster, Machine


def read_list(text, where):
    out = []
    for w in text.split(","):
        h, _, n = w.partition(":")
        out.append(Machine(h, int(n or 0)))
    return Cluster(tuple(out))


def read(text, where):
    return read_list(",".join(l.split()[0] for l in text.splitlines()), where)
