"""Finds the cluster description to use among files and launchers' environment variables."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from manyhands.cluster.hosts.inventory import Cluster, LauncherPlace, Rendezvous, is_host
from manyhands.cluster.hosts.own import find_machine, reachable
from manyhands.cluster.hosts.variables import port
from manyhands.config.job import ClusterOptions
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import UserError
from manyhands.core.files import MOST_TEXT_BYTES, decoded, read_bytes

FORMATS = "manyhands.cluster.hosts.formats"
DEFAULT_PORT = 29500


def given_cluster(options: ClusterOptions, variables: Mapping[str, str]) -> tuple[Cluster, str] | None:
    """Reads the cluster file that a flag or RANK_TABLE_FILE names. Returns the cluster and its origin."""
    named = (
        (options.rank_table, "--rank-table"),
        (options.file, "--cluster"),
        (variables.get("RANK_TABLE_FILE", ""), "RANK_TABLE_FILE"),
    )
    for path, origin in named:
        if path:
            return read_cluster(Path(path), options.join_timeout_s), f"{origin} {path}"
    return None


def read_cluster(path: Path, wait_s: float = 0.0) -> Cluster:
    """Reads a cluster from a file in any known format; waits for one that is still being written. Raises UserError."""
    try:
        text = decoded(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
    except OSError as error:
        hints = ("check the path and the permissions of the file",)
        raise UserError(f"{path} can't be read: {error.strerror}", str(path), hints) from error
    except ValueError as error:
        hints = (f"use one of the supported formats: {', '.join(readable_formats())}",)
        raise UserError(f"{path} is not a cluster file: {error}", str(path), hints) from error
    module = format_of(str(path), text)
    if wait_s and hasattr(module, "wait"):
        text = module.wait(path, wait_s)
    return module.read(text, str(path))


def format_of(path: str, text: str) -> ModuleType:
    """Returns the module of the file's format. Raises UserError: the format is unknown."""
    formats = readable_formats()
    for module in formats.values():
        if module.recognise(path, text):
            return module
    what = "the cluster file is in an unknown format" if text.strip() else "the cluster file is empty"
    raise UserError(what, path, (f"use one of the supported formats: {', '.join(formats)}",))


def readable_formats() -> dict[str, ModuleType]:
    """Returns the modules of the formats that files can have, by name."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_with("recognise")}


def modules_with(function: str) -> Iterator[ModuleType]:
    """Yields the formats that define `function`, by ascending `PRECEDENCE`."""
    found = [load_choice(FORMATS, name) for name in module_names(FORMATS)]
    yield from sorted(
        (module for module in found if hasattr(module, function)), key=lambda module: getattr(module, "PRECEDENCE", 0)
    )


def find_place(variables: Mapping[str, str]) -> LauncherPlace | None:
    """Returns this process's place from the first launcher's variables. Raises UserError: variables are missing."""
    return next((place for module in modules_with("place") if (place := module.place(variables))), None)


def other_places(variables: Mapping[str, str], chosen: tuple[int, int]) -> list[str]:
    """Describes other launchers' variables that contradict the chosen rank and size."""
    differing: list[str] = []
    for module in modules_with("place"):
        try:
            place: LauncherPlace | None = module.place(variables)
        except UserError:
            continue  # variables of a launcher that is not used may be incomplete
        if place and (place.rank, place.size) != chosen:
            rank, size = place.origins.get("rank", "rank"), place.origins.get("size", "size")
            differing.append(f"{place.started_by}: {rank} {place.rank}, {size} {place.size}")
    return differing


def described_cluster(variables: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that a launcher's variables describe, such as Kubeflow's PET_*."""
    for module in modules_with("from_environment"):
        cluster: Cluster | None = module.from_environment(variables)
        if cluster:
            return cluster
    return None


def refuse_alone(variables: Mapping[str, str]) -> None:
    """Raises UserError if a scheduler's job has several tasks and this process was started without its launcher."""
    for module in modules_with("alone"):
        error: UserError | None = module.alone(variables)
        if error:
            raise error


def rendezvous_in(
    cluster: Cluster, origin: str, options: ClusterOptions, variables: Mapping[str, str]
) -> tuple[Rendezvous, dict[str, str]]:
    """Returns the rendezvous of this machine's processes, and each value's origin. Raises UserError."""
    here = find_machine(cluster)
    if not 0 <= here < len(cluster.machines):
        what = f"machine {here} is out of range; expected 0 … {len(cluster.machines) - 1}"
        raise UserError(what, origin)
    several = len(cluster.machines) > 1
    sizes = tuple(machine.slots or options.processes for machine in cluster.machines)
    address = cluster.master_address or cluster.machines[0].address
    if address and not is_host(address):
        what = f'"{address}" is not a host name or an IP address'
        raise UserError(what, origin, ("write the name or the address of rank 0's machine, such as 10.0.0.1",))
    if several:
        address = reachable(address)
    elif not cluster.master_address:
        address = "127.0.0.1"
    origins = {
        "machine": origin if cluster.machine is not None else "this machine's names and addresses",
        "processes": "-n" if options.processes and not cluster.machines[here].slots else origin,
        "size": origin,
        "master_address": origin if cluster.master_address else "the first machine" if several else "one machine alone",
        "master_port": origin if cluster.master_port else "MASTER_PORT" if variables.get("MASTER_PORT") else "default",
        "device": origin if cluster.machines[here].devices else "",
    }
    slots = cluster.machines[here].slots
    if options.processes and slots and slots != options.processes:
        origins["overridden"] = f"-n {options.processes}"
    rendezvous = Rendezvous(
        sizes, here, address, cluster.master_port or port(variables, DEFAULT_PORT), cluster.machines[here].devices
    )
    return rendezvous, origins
