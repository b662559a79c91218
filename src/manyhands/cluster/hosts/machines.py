"""The machines that a job is to be launched on."""

from collections.abc import Sequence
from pathlib import Path

from manyhands.cluster.hosts.formats import hostfile
from manyhands.cluster.hosts.inventory import Machine, in_brackets
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.files import MOST_TEXT_BYTES, decoded, read_bytes


def with_machines(options: ClusterOptions, more: Sequence[Machine]) -> ClusterOptions:
    """The same cluster with further machines behind those that hosts or a hostfile name; unchanged without either."""
    named = machines_of(options)
    if not (named and more):
        return options
    return options.model_copy(update={"hosts": tuple(map(_written, (*named, *more))), "hostfile": ""})


def _written(machine: Machine) -> str:
    """As a list of hosts has it."""
    user = machine.host[: -len(machine.address)]
    target = machine.target if machine.port else user + in_brackets(machine.address)
    return f"{target} slots={machine.slots}" if machine.slots else target


def machines_of(options: ClusterOptions) -> tuple[Machine, ...]:
    """The machines that are named, in their ranks' order. Raises UserError: hosts and a hostfile, or broken ones."""
    if options.hosts and options.hostfile:
        raise UserError("both hosts and a hostfile are given", "cluster.hosts", ("remove --hosts or --hostfile",))
    if options.hosts:
        return hostfile.read_list(",".join(options.hosts), "cluster.hosts").machines
    if options.hostfile:
        path = Path(options.hostfile).expanduser()
        try:
            text = decoded(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
        except (OSError, ValueError) as error:
            hints = ("check the path and the permissions of the file",)
            raise UserError(f"the hostfile can't be read: {error}", str(path), hints) from None
        return hostfile.read(text, str(path)).machines
    return ()
