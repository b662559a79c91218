"""What a format can hold: a cluster that is written and read again must be the same."""

from collections.abc import Callable
from dataclasses import replace

from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.core.errors import UserError


def canonical(cluster: Cluster) -> Cluster:
    """The cluster in the one form that reading gives: what a reader would assume anyway is left empty."""
    machines = tuple(_plain(machine) for machine in cluster.machines)
    own = bool(machines) and cluster.master_address == machines[0].address
    return replace(cluster, machines=machines, master_address="" if own else cluster.master_address)


def without_ports(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """The cluster as formats see it that know of no ssh, and what that leaves out."""
    if not any(machine.port for machine in cluster.machines):
        return cluster, []
    machines = tuple(replace(machine, port=0) for machine in cluster.machines)
    return replace(cluster, machines=machines), ["the ports of ssh are left out: only a hostfile has a place for them"]


def must_hold(text: str, cluster: Cluster, read: Callable[[str, str], Cluster], name: str) -> str:
    """The text, if reading it gives the cluster again. Raises UserError: the format has no place for what it names."""
    found, wanted = read(text, f"{name} to be written"), canonical(cluster)
    if found == wanted:
        return text
    what = f"{name} has no place for {_difference(found, wanted)}"
    raise UserError(what, cluster.source, ("change that, or choose a format that has one",))


def _plain(machine: Machine) -> Machine:
    usual = machine.devices == tuple(range(machine.slots))
    return replace(machine, devices=()) if usual else machine


def _difference(found: Cluster, wanted: Cluster) -> str:
    """The first thing that was lost, for the user."""
    for here, there in zip(found.machines, wanted.machines, strict=False):
        name = there.host or "a machine"
        lost = {
            f'the name "{there.host}"': here.host != there.host,
            f"the port of {name}'s ssh": here.port != there.port,
            f"{there.slots or 'an unknown number of'} processes on {name}": here.slots != there.slots,
            f"the numbers of the devices of {name}": here.devices != there.devices,
        }
        for what, is_lost in lost.items():
            if is_lost:
                return what
    lost = {
        f"{len(wanted.machines)} machines like these": len(found.machines) != len(wanted.machines),
        f"the master's address {wanted.master_address}": found.master_address != wanted.master_address,
        f"the master's port {wanted.master_port}": found.master_port != wanted.master_port,
    }
    return next((what for what, is_lost in lost.items() if is_lost), "which machine is this one")
