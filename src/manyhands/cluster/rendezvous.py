"""Decides how this process takes part: on its own, as one of a launcher's workers, or in a group met by hand.

The flags --init, --rank and --world-size win over what torchrun and its like set for each worker, that over other
launchers' variables, those over descriptions of a cluster, and without any of these manyhands starts the processes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from manyhands.cluster.agents.orders import DEVICE_INDEX
from manyhands.cluster.hosts.inventory import Cluster, LauncherPlace, Rendezvous
from manyhands.cluster.hosts.own import reachable, seen_by_others
from manyhands.cluster.hosts.recognise import (
    DEFAULT_PORT,
    described_cluster,
    find_place,
    given_cluster,
    other_places,
    refuse_alone,
    rendezvous_in,
)
from manyhands.cluster.hosts.variables import check_rank, number, port
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.world import ProcessInfo

# What torchrun, torch.distributed.launch and compatible launchers set for each of their workers.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankOutsideError(UserError):
    """A rank beyond the number of processes: the others may already wait for one that never comes."""

    process_info: ProcessInfo  # the place that was asked for; where the others are to be found


@dataclass(frozen=True)
class LaunchDecision:
    """How this process takes part."""

    # its place in a group somebody else formed; None when manyhands starts the processes itself
    process_info: ProcessInfo | None
    processes: int = 0  # how many manyhands starts on this machine; 0 for one per accelerator
    # other machines that start their own processes and meet this one's; None for this machine alone
    rendezvous: Rendezvous | None = None
    # what each of these came from, for `manyhands explain`; "overridden" names what was not followed
    origins: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[tuple[str, str, str], ...] = ()  # `Cluster.requests`


def participate(options: ClusterOptions, environment: Mapping[str, str] | None = None) -> LaunchDecision:
    """Reads flags first, then launchers' variables, then descriptions of the cluster.

    Raises:
        UserError: the flags or variables contradict each other or leave something out.
    """
    variables = os.environ if environment is None else environment
    if options.init and not options.init.startswith("env://"):
        return _with_others(_by_hand(options), variables)
    if options.init.startswith("env://"):
        return _with_others(_from_environment(options, variables), variables, options)
    if options.rank >= 0 or options.world_size:
        raise UserError(
            "--rank and --world-size require --init",
            "--init",
            ("add the address of rank 0: --init tcp://ADDRESS:23456", "or start N processes on this machine: -n N"),
        )
    return _launched(options, variables) or _described(options, variables) or _started_here(options, variables)


def refuse_unfollowed(options: ClusterOptions, found: LaunchDecision) -> None:
    """Raises UserError where a flag names processes or machines, and a launcher's variables or a file name others."""
    member, origins = found.process_info, found.origins
    if member and member.started_by == "--init":
        return
    here = {member.local_size if member else found.processes}
    # Older launchers don't set LOCAL_WORLD_SIZE; LOCAL_RANK is not set where each machine has one process.
    unknown = member and origins["local_size"] == "default"
    if member and unknown and origins["local_rank"] != "default":
        here.add(member.size)
    words = {"file": "--cluster", "hosts": "--hosts", "hostfile": "--hostfile"} if member else {}
    if member and origins["rank"] == "RANK":
        words["rank_table"] = "--rank-table"
    unfollowed = [word for name, word in words.items() if name in options.flags]
    if "processes" in options.flags and options.processes not in {0, *here}:
        unfollowed.insert(0, f"-n {options.processes}")
    if not unfollowed:
        return
    names = [name for name in dict.fromkeys(origins.values()) if name in os.environ]
    said = f"this process has rank {member.rank} of {member.size}" if member else f"{found.processes} on this machine"
    if member and not unknown:
        said += f", and this machine has {member.local_size} process(es)"
    raise UserError(
        f"{unfollowed[0]} contradicts {', '.join(names) or origins['size']}: {said}",
        "environment" if names else origins["size"],
        (
            f"remove {' and '.join(unfollowed)}",
            *([f"or unset variables left over from another launcher: unset {' '.join(names)}"] if names else []),
        ),
    )


def _launched(options: ClusterOptions, variables: Mapping[str, str]) -> LaunchDecision | None:
    """As a worker that some launcher started."""
    # Kubeflow sets RANK for each machine, beside PET_… for torchrun; LOCAL_RANK tells torchrun's own workers.
    counts_machines = "LOCAL_RANK" not in variables and described_cluster(variables)
    if all(variables.get(name) for name in LAUNCHER_VARIABLES) and not counts_machines:
        return _with_others(_from_environment(options, variables), variables, options)
    if options.rank_table:
        variables = {**variables, "RANK_TABLE_FILE": options.rank_table}
    place = find_place(variables)
    if place:
        return _with_others(_at_place(options, place, variables), variables, options)
    if not counts_machines and (variables.get("RANK") or number(variables, "WORLD_SIZE", 1) > 1):
        raise _incomplete("the launcher did not set", variables)
    return None


def _described(options: ClusterOptions, variables: Mapping[str, str]) -> LaunchDecision | None:
    """As a machine of a described cluster, which starts its own processes."""
    found: tuple[Cluster, str] | None = given_cluster(options, variables)
    if not found:
        cluster = described_cluster(variables)
        found = (cluster, cluster.source or "environment") if cluster else None
    if not found:
        return None
    rendezvous, origins = rendezvous_in(*found, options, variables)
    own = rendezvous.sizes[rendezvous.machine]
    if len(rendezvous.sizes) == 1 and rendezvous.devices in {(), tuple(range(own))}:
        return LaunchDecision(None, own, origins=origins, requests=found[0].requests)
    return LaunchDecision(None, own, rendezvous, origins, found[0].requests)


def _started_here(options: ClusterOptions, variables: Mapping[str, str]) -> LaunchDecision:
    if not options.processes and not (options.hosts or options.hostfile):
        refuse_alone(variables)
    origins = {"processes": "-n" if options.processes else "default"}
    return LaunchDecision(None, options.processes, origins=origins)


def _by_hand(options: ClusterOptions) -> tuple[ProcessInfo, dict[str, str]]:
    if options.processes > 1:
        raise UserError(
            "-n and --init contradict each other: -n starts several processes, and --init joins only one",
            "-n",
            ("remove -n and start each process with its own --rank", "or remove --init"),
        )
    if options.world_size < 1 or options.rank < 0:
        raise UserError(
            "--init requires --world-size and --rank",
            "--init",
            (
                "set --world-size to the number of processes on all machines",
                "set --rank to 0 for the first process, 1 for the second, and so on",
            ),
        )
    place = LauncherPlace(options.rank, options.world_size, started_by="--init")
    process_info = _process_info(options, place, _seen_url(options))
    _check_rank(process_info, "--rank", "--world-size")
    origins = {
        "rank": "--rank", "size": "--world-size", "master_address": "--init", "master_port": "--init",
        "local_rank": "determined at rendezvous", "local_size": "determined at rendezvous",
    }  # fmt: skip
    return process_info, origins


def _check_rank(process_info: ProcessInfo, rank_word: str, size_word: str) -> None:
    try:
        check_rank(process_info.rank, process_info.size, rank_word, size_word)
    except UserError as error:
        outside = RankOutsideError(error.message, error.where, error.hints)
        outside.process_info = process_info
        raise outside from None


def _from_environment(options: ClusterOptions, variables: Mapping[str, str]) -> tuple[ProcessInfo, dict[str, str]]:
    if not all(variables.get(name) for name in LAUNCHER_VARIABLES):
        raise _incomplete("env:// requires", variables)
    place = LauncherPlace(
        number(variables, "RANK"),
        number(variables, "WORLD_SIZE"),
        number(variables, "LOCAL_RANK", 0),
        number(variables, "LOCAL_WORLD_SIZE", 1),
        variables["MASTER_ADDR"],
        port(variables, DEFAULT_PORT),
        started_by="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment",
    )
    served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    init = "env://"
    if place.size > place.local_size and not served:
        seen = reachable if "LOCAL_WORLD_SIZE" in variables else seen_by_others
        address = seen(place.master_address)
        init = init if address == place.master_address else _url(address, place.master_port)
    process_info = replace(
        _process_info(options, place, init),
        agent_store=served,
        attempt=number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    _check_rank(process_info, "RANK", "WORLD_SIZE")
    names = {
        "rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
        "master_address": "MASTER_ADDR", "master_port": "MASTER_PORT",
    }  # fmt: skip
    return process_info, {key: name if name in variables else "default" for key, name in names.items()}


def _incomplete(what: str, variables: Mapping[str, str]) -> UserError:
    missing = [name for name in LAUNCHER_VARIABLES if not variables.get(name)]
    there = [name for name in LAUNCHER_VARIABLES if variables.get(name)]
    hints = [f"export {' '.join(missing)}", "or start with torchrun, or give --init tcp://…"]
    hints += [f"or unset variables left over from another launcher: unset {' '.join(there)}"] if there else []
    found = f" (set: {', '.join(there)})" if there else ""
    return UserError(f"{what} {', '.join(missing)}{found}", "environment", tuple(hints))


def _at_place(
    options: ClusterOptions, place: LauncherPlace, variables: Mapping[str, str]
) -> tuple[ProcessInfo, dict[str, str]]:
    """At the place that a launcher's own variables give; several machines need an address that all reach."""
    check_rank(place.rank, place.size, *(place.origins.get(key, key) for key in ("rank", "size")))
    origins = {key: value for key, value in place.origins.items() if value}
    address, together = place.master_address, place.size == place.local_size
    if not address and together:
        address, origins["master_address"] = "127.0.0.1", "all processes are on one machine"
    elif not address and variables.get("MASTER_ADDR"):
        address, origins["master_address"] = variables["MASTER_ADDR"], "MASTER_ADDR"
    if not address:
        what = f"{place.started_by} started processes on several machines without the address of rank 0"
        hints = ("set MASTER_ADDR on every machine to an address of rank 0's machine",)
        raise UserError(what, "MASTER_ADDR", hints)
    if not place.master_port:
        origins["master_port"] = "MASTER_PORT" if variables.get("MASTER_PORT") else "default"
    url = _url(address if together else reachable(address), place.master_port or port(variables, DEFAULT_PORT))
    return _process_info(options, place, url), origins


def _process_info(options: ClusterOptions, place: LauncherPlace, init: str) -> ProcessInfo:
    return ProcessInfo(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        init=init,
        backend=options.backend,
        device=options.device,
        started_by=place.started_by,
        join_warn_s=options.join_warn_s,
        join_timeout_s=options.join_timeout_s,
        device_index=place.device,
    )


def _with_others(
    found: tuple[ProcessInfo, dict[str, str]], variables: Mapping[str, str], options: ClusterOptions | None = None
) -> LaunchDecision:
    """Notes what else said who this process is, and was not followed."""
    process_info, origins = found
    others = other_places(variables, (process_info.rank, process_info.size))
    if "RANK" in variables and origins["rank"] != "RANK":
        theirs = variables["RANK"], variables.get("WORLD_SIZE", "")
        if theirs != (str(process_info.rank), str(process_info.size)):
            others.append(f"RANK {theirs[0]}, WORLD_SIZE {theirs[1] or 'not set'}")
    if options and options.processes:
        others.append(f"-n {options.processes}")
    if options and options.file:
        others.append(f"--cluster {options.file}")
    if others:
        origins["overridden"] = "; ".join(others)
    return LaunchDecision(process_info, origins=origins)


def worker_process_info(options: ClusterOptions, variables: Mapping[str, str], file: str = "") -> ProcessInfo:
    """The place of a process that manyhands' own agent started; the agent serves the store, unless a file is one."""
    process_info, _ = _from_environment(options, {**variables, "MASTER_PORT": str(DEFAULT_PORT)} if file else variables)
    device = number(variables, DEVICE_INDEX, -1)
    return replace(
        process_info,
        started_by="manyhands",
        init=file or "env://",
        agent_store=process_info.agent_store and not file,
        device_index=device if device >= 0 else None,
    )


def _seen_url(options: ClusterOptions) -> str:
    """A tcp:// URL with an address that the other machines know, where its name stands for loopback here."""
    init = options.init
    try:
        url = urlsplit(init)
        host, port = url.hostname, url.port
    except ValueError as error:
        hints = ("write a URL such as --init tcp://10.0.0.1:23456",)
        raise UserError(f'"{init}" is not a URL: {error}', "--init", hints) from None
    if url.scheme != "tcp" or not host or not port:
        return init  # what is wrong with it is said when it is used
    if options.rank > 0 and host in {"0.0.0.0", "::"}:
        what = f"{host} means all addresses of rank 0's machine; other ranks can't connect to {host}"
        raise UserError(what, "--init", ("write rank 0's address",))
    return _url(seen_by_others(host), port)


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
