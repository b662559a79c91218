"""Determines the role of this process: a single process, a launcher's worker, or a rank given with `--init`.

The order of precedence is: the flags --init, --rank and --world-size; variables of torchrun and compatible launchers;
other launchers' variables; files and variables that describe a cluster. Otherwise manyhands starts the processes.

Also reads the machines of a job from cluster.hosts, from files, and from launchers' variables.
"""

import ipaddress
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from manyhands.cluster.hosts import inventory
from manyhands.config.job import ClusterOptions
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import UserError, first_names
from manyhands.core.files import MOST_TEXT_BYTES, decode_text, read_bytes
from manyhands.core.world import ProcessInfo
from manyhands.parallel.group.ports import local_addresses, reachable_addresses

# Variables that torchrun, torch.distributed.launch and compatible launchers set for each worker.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FORMATS = "manyhands.cluster.hosts.formats"
ANY = {"0.0.0.0", "::"}  # all addresses of a machine


class RankOutsideError(UserError):
    """Raised if this process's rank is out of range. Other ranks may already be waiting at the rendezvous."""

    process_info: ProcessInfo  # the requested rank, and the address of the other ranks


@dataclass(frozen=True)
class LaunchDecision:
    """The rank of this process, if a launcher has started it; otherwise the processes that this command starts."""

    process_info: ProcessInfo | None  # this process's rank in an existing group; None if manyhands starts the processes
    processes: int = 0  # number to start on this machine; 0 for one per accelerator
    rendezvous: inventory.Rendezvous | None = None  # with other machines, which start their own processes; else None
    # by value: variable, flag or file, for `manyhands explain`; "overridden" names what was not followed
    origins: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[tuple[str, str, str], ...] = ()  # `Cluster.requests`


def decide_launch(options: ClusterOptions, environment: Mapping[str, str] | None = None) -> LaunchDecision:
    """Determines the role of this process from flags, variables or files. Raises UserError for invalid values."""
    variables = os.environ if environment is None else environment
    if options.init:
        place = _from_variables(variables) if options.init.startswith("env://") else _from_flags(options)
        return _decide(options, place, variables)
    if options.rank >= 0 or options.world_size:
        hints = ("add the address of rank 0: --init tcp://ADDRESS:23456", "or start N processes on this machine: -n N")
        raise UserError("--rank and --world-size require --init", "--init", hints)
    if launched := _from_launcher(options, variables):
        return launched
    cluster, origin = given_cluster(options, variables) or (described_cluster(variables), "")
    if cluster:
        return decide_from_cluster(cluster, origin or cluster.source or "environment", options, variables)
    if not options.processes and not (options.hosts or options.hostfile):
        for module in modules_with("missing_launcher_error"):
            if error := module.missing_launcher_error(variables):  # such as one task of a Slurm job without srun
                raise error
    return LaunchDecision(None, options.processes, origins={"processes": "-n" if options.processes else "default"})


def refuse_contradicted_flags(options: ClusterOptions, found: LaunchDecision) -> None:
    """Raises UserError if a launcher's variables or a file contradict a flag about processes or machines."""
    member, origins = found.process_info, found.origins
    if member and member.started_by == "--init":
        return
    here, words, place = {0, found.processes}, dict[str, str](), f"{found.processes} on this machine"
    if member:
        here, place = {0, member.local_size}, f"this process has rank {member.rank} of {member.size}"
        words = {"file": "--cluster", "hosts": "--hosts", "hostfile": "--hostfile"}
        words |= {"rank_table": "--rank-table"} if origins["rank"] == "RANK" else {}
        # Older launchers don't set LOCAL_WORLD_SIZE; LOCAL_RANK may be missing if each machine has one process.
        if origins["local_size"] != "default":
            place += f", and this machine has {member.local_size} process(es)"
        elif origins["local_rank"] != "default":
            here.add(member.size)
    unfollowed = [word for name, word in words.items() if name in options.flags]
    if "processes" in options.flags and options.processes not in here:
        unfollowed.insert(0, f"-n {options.processes}")
    if not unfollowed:
        return
    names = [name for name in dict.fromkeys(origins.values()) if name in os.environ]
    hints = [f"remove {' and '.join(unfollowed)}"]
    hints += [f"or unset variables left over from another launcher: unset {' '.join(names)}"] if names else []
    message = f"{unfollowed[0]} contradicts {', '.join(names) or origins['size']}: {place}"
    raise UserError(message, "environment" if names else origins["size"], tuple(hints))


def _from_launcher(options: ClusterOptions, variables: Mapping[str, str]) -> LaunchDecision | None:
    """Returns the launch decision from a launcher's variables; None if no launcher has set variables."""
    # Kubeflow sets RANK to a machine's index, in addition to PET_…; torchrun's own workers have LOCAL_RANK.
    counts_machines = "LOCAL_RANK" not in variables and described_cluster(variables)
    if all(variables.get(name) for name in LAUNCHER_VARIABLES) and not counts_machines:
        return _decide(options, _from_variables(variables), variables)
    if options.rank_table:
        variables = {**variables, "RANK_TABLE_FILE": options.rank_table}
    for module in modules_with("place"):
        if place := module.place(variables):
            return _decide(options, place, variables)
    if not counts_machines and (variables.get("RANK") or inventory.number(variables, "WORLD_SIZE", 1) > 1):
        raise _missing_variables_error("the launcher did not set", variables)
    return None


def decide_from_cluster(
    cluster: inventory.Cluster, origin: str, options: ClusterOptions, variables: Mapping[str, str]
) -> LaunchDecision:
    """Returns the launch decision for this machine, given a cluster from a file or a launcher's variables."""
    here = find_machine(cluster)
    own, first, several = cluster.machines[here], cluster.machines[0].address, len(cluster.machines) > 1
    if first and not inventory.is_host(first):
        message = f'"{first}" is not a host name or an IP address'
        raise UserError(message, origin, ("write the name or the address of rank 0's machine, such as 10.0.0.1",))
    address = reachable_address(first) if several else "127.0.0.1"
    given = (cluster.master_port, origin) if cluster.master_port else None
    port, port_origin = given or inventory.master_port(variables)
    origins = {
        "machine": origin if cluster.machine is not None else "this machine's names and addresses", "size": origin,
        "processes": "-n" if options.processes and not own.slots else origin, "device": origin if own.devices else "",
        "master_address": "the first machine" if several else "one machine alone", "master_port": port_origin,
    }  # fmt: skip
    if options.processes and own.slots not in {0, options.processes}:
        origins["overridden"] = f"-n {options.processes}"
    sizes = tuple(machine.slots or options.processes for machine in cluster.machines)
    alone = not several and own.devices in {(), tuple(range(sizes[here]))}
    rendezvous = None if alone else inventory.Rendezvous(sizes, here, address, port, own.devices)
    return LaunchDecision(None, sizes[here], rendezvous, origins, cluster.requests)


def _from_flags(options: ClusterOptions) -> inventory.LauncherPlace:
    if options.processes > 1:
        message = "-n and --init contradict each other: -n starts several processes, and --init joins only one"
        raise UserError(message, "-n", ("remove -n and start each process with its own --rank", "or remove --init"))
    if options.world_size < 1 or options.rank < 0:
        hints = ("set --world-size to the number of processes on all machines",
                 "set --rank to 0 for the first process, 1 for the second, and so on")  # fmt: skip
        raise UserError("--init requires --world-size and --rank", "--init", hints)
    try:
        url = urlsplit(options.init)
        host, port = url.hostname, url.port
    except ValueError as error:
        hints = ("write a URL such as --init tcp://10.0.0.1:23456",)
        raise UserError(f'"{options.init}" is not a URL: {error}', "--init", hints) from None
    init = options.init
    if url.scheme == "tcp" and host and port:  # torch.distributed reports errors in other URLs
        if options.rank > 0 and host in ANY:
            message = f"{host} is a wildcard address; other ranks can't connect to {host}"
            raise UserError(message, "--init", ("write rank 0's address",))
        # An explicit loopback address stays: the processes may all be on one machine.
        init = f"tcp://{inventory.in_brackets(host if _is_loopback(host) else reachable_address(host))}:{port}"
    origins = {
        "rank": "--rank", "size": "--world-size", "master_address": "--init", "master_port": "--init",
        "local_rank": "determined at rendezvous", "local_size": "determined at rendezvous",
    }  # fmt: skip
    return inventory.LauncherPlace(options.rank, options.world_size, started_by="--init", origins=origins, init=init)


def _from_variables(variables: Mapping[str, str]) -> inventory.LauncherPlace:
    if not all(variables.get(name) for name in LAUNCHER_VARIABLES):
        raise _missing_variables_error("env:// requires", variables)
    size, local_size = inventory.number(variables, "WORLD_SIZE"), inventory.number(variables, "LOCAL_WORLD_SIZE", 1)
    address, (port, _), init = variables["MASTER_ADDR"], inventory.master_port(variables), "env://"
    served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Without LOCAL_WORLD_SIZE, the processes may all be on one machine and connect over loopback.
    unknown = "LOCAL_WORLD_SIZE" not in variables and _is_loopback(address)
    if size > local_size and not served and not unknown and (found := reachable_address(address)) != address:
        init = f"tcp://{inventory.in_brackets(found)}:{port}"
    names = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
             "master_address": "MASTER_ADDR", "master_port": "MASTER_PORT"}  # fmt: skip
    return inventory.LauncherPlace(
        inventory.number(variables, "RANK"), size, inventory.number(variables, "LOCAL_RANK", 0), local_size,
        init=init, agent_store=served, started_by="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment",
        origins={key: name if name in variables else "default" for key, name in names.items()},
        attempt=inventory.number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )  # fmt: skip


def _missing_variables_error(problem: str, variables: Mapping[str, str]) -> UserError:
    there = [name for name in LAUNCHER_VARIABLES if variables.get(name)]
    missing = [name for name in LAUNCHER_VARIABLES if name not in there]
    hints = [f"export {' '.join(missing)}", "or start with torchrun, or give --init tcp://…"]
    hints += [f"or unset variables left over from another launcher: unset {' '.join(there)}"] if there else []
    found = f" (set: {', '.join(there)})" if there else ""
    return UserError(f"{problem} {', '.join(missing)}{found}", "environment", tuple(hints))


def _process_info(options: ClusterOptions, place: inventory.LauncherPlace) -> ProcessInfo:
    """Combines a rank with the job's options. For several machines, selects an address that all of them can reach."""
    init = place.init
    if not init:
        address = place.master_address if place.size == place.local_size else reachable_address(place.master_address)
        init = f"tcp://{inventory.in_brackets(address)}:{place.master_port}"
    names = ("backend", "device", "join_warn_s", "join_timeout_s")
    process_info = replace(place, init=init, **{name: getattr(options, name) for name in names})
    try:
        inventory.check_rank(place.rank, place.size, *(place.origins.get(key, key) for key in ("rank", "size")))
    except UserError as error:
        outside = RankOutsideError(error.message, error.where, error.hints)
        outside.process_info = process_info
        raise outside from None
    return process_info


def _decide(options: ClusterOptions, place: inventory.LauncherPlace, variables: Mapping[str, str]) -> LaunchDecision:
    """Returns the launch decision for a rank. `origins["overridden"]` names ignored variables and flags."""
    process_info = _process_info(options, place)
    origins, others = {key: value for key, value in place.origins.items() if value}, list[str]()
    for module in modules_with("place"):
        try:
            other: inventory.LauncherPlace | None = module.place(variables)
        except UserError:
            continue  # variables of a launcher that is not used may be incomplete
        if other and (other.rank, other.size) != (place.rank, place.size):
            rank, size = other.origins.get("rank", "rank"), other.origins.get("size", "size")
            others.append(f"{other.started_by}: {rank} {other.rank}, {size} {other.size}")
    if "RANK" in variables and origins["rank"] != "RANK":
        theirs = variables["RANK"], variables.get("WORLD_SIZE", "")
        if theirs != (str(place.rank), str(place.size)):
            others.append(f"RANK {theirs[0]}, WORLD_SIZE {theirs[1] or 'not set'}")
    if place.started_by != "--init":
        others += [f"-n {options.processes}"] if options.processes else []
        others += [f"--cluster {options.file}"] if options.file else []
    if others:
        origins["overridden"] = "; ".join(others)
    return LaunchDecision(process_info, origins=origins)


def find_machine(cluster: inventory.Cluster) -> int:
    """Returns this machine's index: the file's, or of the only name or address that matches. Raises UserError."""
    if cluster.machine is not None:
        return cluster.machine
    names, mine = [machine.address for machine in cluster.machines], set(local_addresses())
    outer = {address for address in mine if not _is_loopback(address)}
    here = [place for place, name in enumerate(names) if is_local_name(name, mine)]
    here = here or [place for place, name in enumerate(names) if not outer.isdisjoint(_resolve(name))]
    if len(here) == 1:
        return here[0]
    own = f"host name {socket.gethostname()}, addresses {', '.join(reachable_addresses()) or 'only loopback'}"
    what = f"is not in the list of machines: {first_names(names)}"
    hint = "add one of this machine's names or addresses to the list"
    if here:
        what = f"is listed {len(here)} times: {' and '.join(names[place] for place in here)}"
        hint = "keep only one of these entries"
    raise UserError(f"this machine ({own}) {what}", cluster.source, (hint,))


def is_this_machine(machine: inventory.Machine) -> bool:
    """Returns True if a machine's host is, or resolves to, one of this machine's addresses."""
    if "@" in machine.host or machine.port:
        return False  # another user's account, or a container or a tunnel, if it is here at all
    own = set(local_addresses())
    return any(address in own or _is_loopback(address) for address in _resolve(machine.address))


def is_local_name(name: str, addresses: Collection[str]) -> bool:
    """Returns True for an address of this machine, localhost, or this machine's host name. Sends no DNS query."""
    if inventory.is_address(name):
        return name in addresses
    mine = socket.gethostname().lower()
    if "." in name and "." in mine:
        return name.lower() == mine
    return name == "localhost" or name.partition(".")[0].lower() == mine.partition(".")[0]


def reachable_address(address: str) -> str:
    """Returns `address`, or this machine's other address if `address` is a name that resolves to loopback.

    Raises UserError if `address` is a loopback address, or if it resolves to loopback and this machine has several
    other addresses or none.
    """
    if address in ANY:
        return address
    if _is_loopback(address):
        message = f"the processes are on several machines, but {address} is a loopback address"
        hints = ("set MASTER_ADDR to an address of rank 0's machine that all machines can reach",)
        raise UserError(message, "MASTER_ADDR", hints)
    found = [] if inventory.is_address(address) else _resolve(address)
    if not (found and all(map(_is_loopback, found))):
        return address
    candidates = [found for found in reachable_addresses() if ":" not in found] or reachable_addresses()
    if len(candidates) == 1:
        return candidates[0]
    has = f"has the addresses {' and '.join(candidates)}" if candidates else "has no other address"
    message = f"the name {address} resolves to loopback on this machine, which {has}; other machines can't reach rank 0"
    hints = (f"in /etc/hosts, map {address} to the address that the other machines reach",
             "or set MASTER_ADDR to the address that the other machines reach")  # fmt: skip
    raise UserError(message, "/etc/hosts", hints)


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (inventory.is_address(address) and ipaddress.ip_address(address).is_loopback)


def _resolve(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []  # only other machines know the name, or it is wrong
    return [str(entry[4][0]).partition("%")[0] for entry in entries]


def with_machines(options: ClusterOptions, more: Sequence[inventory.Machine]) -> ClusterOptions:
    """Appends `more` to the machines in the options. Returns `options` if they or `more` have no machines."""
    named, hosts = machines_of(options), list[str]()
    if not (named and more):
        return options
    for machine in (*named, *more):
        hosts.append(machine.target + (f" slots={machine.slots}" if machine.slots else ""))
    return options.model_copy(update={"hosts": tuple(hosts), "hostfile": ""})


def machines_of(options: ClusterOptions) -> tuple[inventory.Machine, ...]:
    """Returns the machines in cluster.hosts or the hostfile, in rank order. Raises UserError if both are set."""
    if options.hosts and options.hostfile:
        raise UserError("both hosts and a hostfile are given", "cluster.hosts", ("remove --hosts or --hostfile",))
    from manyhands.cluster.hosts.formats import hostfile  # not needed in workers, which import this module

    if options.hosts:
        return hostfile.read_list(",".join(options.hosts), "cluster.hosts").machines
    if options.hostfile:
        path = Path(options.hostfile).expanduser()
        return hostfile.read(_read_text(path), str(path)).machines
    return ()


def given_cluster(options: ClusterOptions, variables: Mapping[str, str]) -> tuple[inventory.Cluster, str] | None:
    """Reads the cluster file that a flag or RANK_TABLE_FILE names, if any. Returns (cluster, origin for messages)."""
    variable = variables.get("RANK_TABLE_FILE", "")
    named = {"--rank-table": options.rank_table, "--cluster": options.file, "RANK_TABLE_FILE": variable}
    for origin, path in named.items():
        if path:
            return read_cluster(Path(path), options.join_timeout_s), f"{origin} {path}"
    return None


def read_cluster(path: Path, wait_s: float = 0.0) -> inventory.Cluster:
    """Reads a cluster file in any known format; waits up to `wait_s` until the file is complete. Raises UserError."""
    text = _read_text(path)
    module = format_of(str(path), text)
    if wait_s and hasattr(module, "wait"):
        text = module.wait(path, wait_s)
    return module.read(text, str(path))


def _read_text(path: Path) -> str:
    try:
        return decode_text(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
    except OSError as error:
        hints = ("check the path and the permissions of the file",)
        raise UserError(f"{path} can't be read: {error.strerror}", str(path), hints) from None
    except ValueError as error:
        hints = (f"use one of the supported formats: {', '.join(readable_formats())}",)
        raise UserError(f"{path} is not a cluster file: {error}", str(path), hints) from None


def format_of(path: str, text: str) -> ModuleType:
    """Returns the module of a file's format. Raises UserError if the format is unknown."""
    formats = readable_formats()
    if found := next((module for module in formats.values() if module.recognize(path, text)), None):
        return found
    message = "the cluster file is in an unknown format" if text.strip() else "the cluster file is empty"
    raise UserError(message, path, (f"use one of the supported formats: {', '.join(formats)}",))


def readable_formats() -> dict[str, ModuleType]:
    """Returns the modules of all file formats, by name."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_with("recognize")}


def modules_with(function: str) -> list[ModuleType]:
    """Returns the format modules that define `function`, in ascending order of `PRECEDENCE`."""
    found = (load_choice(FORMATS, name) for name in module_names(FORMATS))
    defining = (module for module in found if hasattr(module, function))
    return sorted(defining, key=lambda module: getattr(module, "PRECEDENCE", 0))


def described_cluster(variables: Mapping[str, str]) -> inventory.Cluster | None:
    """Returns the cluster that a launcher's variables (such as Kubeflow's PET_*) describe; None if they are not set."""
    clusters = (module.from_environment(variables) for module in modules_with("from_environment"))
    return next(filter(None, clusters), None)
