"""The machines that a job is to be launched on."""

from pathlib import Path

from manyhands.cluster.descriptions.formats import hostfile
from manyhands.cluster.descriptions.inventory import Machine
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.outside import MOST_TEXT_BYTES, decoded, read_bytes


def machines_of(options: ClusterOptions) -> tuple[Machine, ...]:
    """The machines that are named, in their ranks' order. Raises UserError: hosts and a hostfile, or broken ones."""
    if options.hosts and options.hostfile:
        raise UserError("hosts and a hostfile are given", "cluster.hosts", ("leave one of them out",))
    if options.hosts:
        return hostfile.read_list(",".join(options.hosts), "cluster.hosts").machines
    if options.hostfile:
        path = Path(options.hostfile).expanduser()
        try:
            text = decoded(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
        except (OSError, ValueError) as error:
            raise UserError(f"the hostfile can't be read: {error}", str(path), ("name a text file",)) from None
        return hostfile.read(text, str(path)).machines
    return ()
