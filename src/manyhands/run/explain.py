"""Explains the rank, device and addresses that training would use here, and the origin of each. Imports no torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from manyhands.cluster.hosts.formats import hostfile, rank_table, slurm
from manyhands.cluster.hosts.inventory import Cluster, Rendezvous
from manyhands.cluster.hosts.this_process import decide_launch, described_cluster, given_cluster, machines_of
from manyhands.config.load import LoadedJob
from manyhands.core.errors import UserError
from manyhands.core.timeouts import time_limits
from manyhands.core.world import ProcessInfo

# Options by flag, as in the origins of a LaunchDecision.
OPTIONS = {"-n": "processes", "--init": "init", "--rank": "rank", "--world-size": "world_size"}
SHORT_S = 0.1  # training waits for a cluster file that is still being written; explain reports that it is
ONE_EACH = "one per accelerator; one without accelerators"
# Files that a driver creates for each device, and the name of the device type.
DEVICE_FILES = {"nvidia[0-9]*": "cuda", "davinci[0-9]*": "npu", "accel/accel[0-9]*": "accelerator"}


class ExplainedValue(NamedTuple):
    """A value that training would use, with its origin."""

    key: str  # its name for scripts
    value: Any  # None if it is determined later
    origin: str = ""
    words: str = ""  # the text for people, if it isn't the value itself

    @property
    def text(self) -> str:
        return self.words or str(self.value)


def explain_values(loaded: LoadedJob, environment: Mapping[str, str] | None = None) -> list[ExplainedValue]:
    """Returns the values that training would use, with their origins. Raises UserError if training couldn't start."""
    variables = os.environ if environment is None else environment
    cluster, origins = loaded.job.cluster, loaded.origins
    found = decide_launch(cluster.model_copy(update={"join_timeout_s": SHORT_S}), variables)
    if info := found.process_info:
        rows, many = _process_rows(info, found.origins, variables), info.size > 1
        index = info.local_rank if info.device_index is None else info.device_index
    elif found.rendezvous:
        rows, many, index = _machine_rows(found.rendezvous, found.origins), sum(found.rendezvous.sizes) != 1, None
    else:
        count, many, index = found.processes or None, found.processes != 1, None
        rows = [
            ExplainedValue("started_by", "manyhands", words="manyhands, on this machine only"),
            ExplainedValue("processes", count, found.origins["processes"], "" if count else ONE_EACH),
            ExplainedValue("master_address", "127.0.0.1", "a single machine"),
            ExplainedValue("master_port", None, "chosen at start", "a free port"),
        ]
    # The value of a flag may come from a file or a variable.
    by_option = {flag: origins.get(f"cluster.{name}", "flag") for flag, name in OPTIONS.items()}
    given = {flag: origin for flag, origin in by_option.items() if origin != "flag"}
    rows = [row._replace(origin=given.get(row.origin, row.origin)) for row in rows]
    rows += [_device_row(loaded, index, found.origins.get("device", "")), _backend_row(loaded, many=many)]
    shares, origin = cluster.shares, origins.get("cluster.shares", "default")
    if shares == "auto":
        rows.append(ExplainedValue("shares", None, origin, "in proportion to measured speed"))
    elif not isinstance(shares, str):
        words = f"{', '.join(map(str, shares))} samples per update"
        rows.append(ExplainedValue("shares", list(shares), origin, words))
    limits = time_limits()
    shown = ", ".join(f"{name} {limits[name]:g} s" for name in ("silent", "alone", "leave", "stop"))
    rows.append(ExplainedValue("time_limits", limits, "fixed", shown))
    if "overridden" in found.origins:
        rows.append(ExplainedValue("not_followed", found.origins["overridden"], "the values above take precedence"))
    return rows


def write_cluster(loaded: LoadedJob, file: Path) -> list[str]:
    """Writes the job's machines to a new file: a rank table if its name ends in .json, otherwise a hostfile.

    Returns a note for each value that the format can't represent. Raises UserError if the format can't represent the
    machines, the file exists, or neither the job nor the environment (PET_*, Slurm) names machines.
    """
    at_once = loaded.job.cluster.model_copy(update={"join_timeout_s": SHORT_S})
    given, named = given_cluster(at_once, os.environ), machines_of(at_once)
    cluster = given[0] if given else Cluster(named) if named else None
    cluster = cluster or described_cluster(os.environ) or slurm.nodes(os.environ)
    if cluster is None:
        hints = ("name a hostfile, rank table or accelerate's config file: --cluster FILE", "or run in a Slurm job")
        raise UserError("no machines are given", "--write", hints)
    if unnamed := [str(place) for place, machine in enumerate(cluster.machines) if not machine.host]:
        message = f"{cluster.source} does not give the names of machines {', '.join(unnamed)}"
        raise UserError(message, "--write", ("list the machines in a hostfile, one per line: n1 slots=4",))
    try:
        text, notes = (rank_table if file.suffix == ".json" else hostfile).write(cluster)
    except UserError as error:
        error.where = cluster.source  # the source, because the file isn't written
        raise
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        what = "already exists" if exists else f"can't be written: {error.strerror}"
        hint = "choose another name, or remove the file first" if exists else "choose another folder"
        raise UserError(f"{file} {what}", "--write", (hint,)) from error
    return notes


def _process_rows(found: ProcessInfo, origins: Mapping[str, str], variables: Mapping[str, str]) -> list[ExplainedValue]:
    url = urlparse(found.init)
    address, port = url.hostname or "", url.port
    if url.scheme == "env":
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    by_hand = found.started_by == "--init"
    rows = [
        ExplainedValue("started_by", found.started_by, words="one command per process" if by_hand else ""),
        ExplainedValue("rank", found.rank, origins["rank"]),
        ExplainedValue("world_size", found.size, origins["size"]),
        *(ExplainedValue(key, None if by_hand else getattr(found, key), origins.get(key, ""), "?" * by_hand)
          for key in ("local_rank", "local_size")),
    ]  # fmt: skip
    if url.scheme == "file":
        return [*rows, ExplainedValue("meeting_file", url.netloc + url.path, origins["master_address"])]
    where = ExplainedValue("master_address", address, origins["master_address"])
    return [*rows, where, ExplainedValue("master_port", port, origins["master_port"])]


def _machine_rows(rendezvous: Rendezvous, origins: Mapping[str, str]) -> list[ExplainedValue]:
    sizes, machine = rendezvous.sizes, rendezvous.machine
    first, own, known = sum(sizes[:machine]), sizes[machine], all(sizes)
    span = f"{first} … {first + own - 1}" if own > 1 else f"{first}"
    ranks = [first, first + own - 1] if known else None
    return [
        ExplainedValue("started_by", "manyhands", words="manyhands, one command per machine"),
        ExplainedValue("machine", machine, origins["machine"], f"{machine} of {len(sizes)}"),
        ExplainedValue("processes", own or None, origins["processes"], "" if own else ONE_EACH),
        ExplainedValue("ranks", ranks, origins["size"], span if known else "determined at rendezvous"),
        ExplainedValue("world_size", sum(sizes) if known else None, origins["size"], "" if known else "?"),
        ExplainedValue("master_address", rendezvous.address, origins["master_address"]),
        ExplainedValue("master_port", rendezvous.port, origins["master_port"]),
    ]


def _device_row(loaded: LoadedJob, index: int | None, index_origin: str) -> ExplainedValue:
    kind, origin = loaded.job.cluster.device, loaded.origins.get("cluster.device", "default")
    if kind != "auto":
        numbered = index is not None and kind not in {"cpu", "mps"} and ":" not in kind
        device = f"{kind}:{index}" if numbered else kind
        return ExplainedValue("device", device, index_origin or origin.replace("flag", "--device"))
    driver = next((word for pattern, word in DEVICE_FILES.items() if any(Path("/dev").glob(pattern))), "")
    if not driver:
        return ExplainedValue("device", None, origin, "cpu or accelerator, decided at start")
    which = f"{driver}:{index}" if index is not None else f"{driver}, one per process"
    return ExplainedValue("device", None, index_origin or "files in /dev", f"{which} if torch can use it, else cpu")


def _backend_row(loaded: LoadedJob, *, many: bool) -> ExplainedValue:
    chosen, kind = loaded.job.cluster.backend, loaded.job.cluster.device
    origin = loaded.origins.get("cluster.backend", "default").replace("flag", "--backend")
    if chosen != "auto":
        return ExplainedValue("backend", chosen, origin)
    if kind == "cpu":
        name, said = ("gloo", "") if many else (None, "none for one process")
        return ExplainedValue("backend", name, "default of the device", said)
    return ExplainedValue("backend", None, origin, "default of the device: gloo for cpu, nccl for cuda …")
