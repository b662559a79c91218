"""This machine among those that a file, or a launcher's variables, describe: each starts its own processes."""

from collections.abc import Mapping
from pathlib import Path

from manyhands.cluster.descriptions.inventory import Cluster, Meeting, is_host
from manyhands.cluster.descriptions.own import find_machine, reachable
from manyhands.cluster.descriptions.variables import port
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError

DEFAULT_PORT = 29500


def given_cluster(options: ClusterOptions, variables: Mapping[str, str]) -> tuple[Cluster, str] | None:
    """The description that the user named, waited for while it is written, and where. Raises UserError."""
    named = (
        (options.rank_table, "--rank-table"),
        (options.file, "--cluster"),
        (variables.get("RANK_TABLE_FILE", ""), "RANK_TABLE_FILE"),
    )
    for path, origin in named:
        if path:
            from manyhands.cluster.descriptions.recognise import read_cluster  # pyright: ignore[reportMissingImports]

            return read_cluster(Path(path), options.join_timeout_s), f"{origin} {path}"
    return None


def meeting_in(
    cluster: Cluster, origin: str, options: ClusterOptions, variables: Mapping[str, str]
) -> tuple[Meeting, dict[str, str]]:
    """How this machine's processes meet the others, and what each value came from. Raises UserError: it isn't there."""
    here = find_machine(cluster)
    if not 0 <= here < len(cluster.machines):
        what = f"this is machine {here}, and there are {len(cluster.machines)}: 0 … {len(cluster.machines) - 1}"
        raise UserError(what, origin)
    several = len(cluster.machines) > 1
    sizes = tuple(machine.slots or options.processes for machine in cluster.machines)
    address = cluster.master_address or cluster.machines[0].address
    if address and not is_host(address):
        what = f'"{address}" is not the name or the address of a machine'
        raise UserError(what, origin, ("write where rank 0's machine is reached, such as 10.0.0.1",))
    if several:
        address = reachable(address)
    elif not cluster.master_address:
        address = "127.0.0.1"
    origins = {
        "machine": origin if cluster.machine is not None else "by its names and addresses",
        "processes": "-n" if options.processes and not cluster.machines[here].slots else origin,
        "size": origin,
        "master_address": origin if cluster.master_address else "the first machine" if several else "one machine alone",
        "master_port": origin if cluster.master_port else "MASTER_PORT" if variables.get("MASTER_PORT") else "default",
        "device": origin if cluster.machines[here].devices else "",
    }
    slots = cluster.machines[here].slots
    if options.processes and slots and slots != options.processes:
        origins["overridden"] = f"-n {options.processes}"
    meeting = Meeting(
        sizes, here, address, cluster.master_port or port(variables, DEFAULT_PORT), cluster.machines[here].devices
    )
    return meeting, origins
