"""Words as they are typed behind flags, each with the function that reads it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.fuzz_mutations import spoil_bytes
from manyhands.cluster.hosts.formats.hostfile import read_list
from manyhands.cluster.rendezvous import participate
from manyhands.config.load import load_job
from manyhands.core.mesh import Mesh, parse_mesh
from manyhands.core.quantities import parse_bandwidth, parse_memory
from manyhands.data.datasets.synthetic import open as open_synthetic
from manyhands.data.options import DataOptions
from manyhands.parallel.plan import parse_pins
from manyhands.parallel.strategy import parse_strategy, parse_tuples

MESH = Mesh((("dp", 2), ("tp", 2)))


def _option(key: str) -> Callable[[str], Any]:
    return lambda word: load_job({key: word}, environment={})


def _meet(word: str) -> None:
    job = load_job({"cluster.init": word, "cluster.world_size": 2, "cluster.rank": 0}, environment={}).job
    participate(job.cluster, {})


OPTIONS = {
    "checkpoint.every": "5min", "train.micro_batch": "4", "train.betas": "[0.9,0.99]", "submit.time_limit": "1:00:00",
    "cluster.ssh": "ssh -p 2", "data.mean": "[0.5]", "parallel.pin": "['a=b']", "model.arguments": "{a=1}",
    "sync.method": "auto", "cluster.interface": "eth0", "data.name": "a.py:b", "submit.nodes": "2",
}  # fmt: skip
WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--mesh": ("dp=2,tp=4", parse_mesh),
    "--memory": ("14GiB", parse_memory),
    "--link": ("10mbit", parse_bandwidth),
    "--pin": ("fc=n@dp o@tp", lambda word: parse_pins((word,))),
    "strategy": ("n@dp o@tp", lambda word: parse_strategy(word, MESH, "x")),
    "tuples": ("((1,1),(1,2))", lambda word: parse_tuples(word, "x")),
    "--hosts": ("n1:2,u@n2,[fd00::1]:4,ssh://a@b:22", lambda word: read_list(word, "--hosts")),
    "--init": ("tcp://n1:29500", _meet),
    "synthetic": ("synthetic:64x1x4x4x2", lambda word: open_synthetic(word[:60], DataOptions(name="synthetic"))),
    **{key: (word, _option(key)) for key, word in OPTIONS.items()},
}


def write_words(folder: Path, rng: random.Random) -> None:
    """One word of one flag, spoilt."""
    flag = rng.choice(list(WORDS))
    word = spoil_bytes(WORDS[flag][0].encode(), rng).decode(errors="surrogateescape")
    (folder / "words.txt").write_text(json.dumps([flag, word]))


def read_words(folder: Path) -> None:
    """Reads it as its flag does."""
    flag, word = json.loads((folder / "words.txt").read_text())
    WORDS[flag][1](word)
