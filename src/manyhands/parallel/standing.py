"""A process group that stands already: a script's own `init_process_group`, Ray Train's, Lightning Fabric's.

It is used as it is, with its store, and stays when we leave: only the groups of some processes that we made go again.
"""

import sys
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.world import ProcessInfo

STARTED_BY = "its own process group"
# In the words of `Membership.init`, which is shown where somebody is missing.
INIT = "the process group that was there already"


def existing_process_info(device: str, backend: str) -> ProcessInfo | None:
    """This process's place in the group that it is in already, if any. Raises UserError: another backend is wanted."""
    # Who hasn't imported it has no group, and the head doesn't import torch.
    distributed: Any = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return None
    place, own = _device_and_backend(distributed, device)
    if backend not in {"auto", own}:
        what = f"cluster.backend is {backend}, but this process is already in a group with {own}"
        raise UserError(what, "cluster.backend", ("leave cluster.backend out to use the existing group",))
    return ProcessInfo(
        rank=distributed.get_rank(),
        size=distributed.get_world_size(),
        init=INIT,
        backend=own,
        device=place,
        agent_store=True,
        started_by=STARTED_BY,
    )


def _device_and_backend(distributed: Any, wanted: str) -> tuple[str, str]:
    """What this process computes on, and the group's backend for that; a group of gloo alone means the CPU."""
    import torch

    from manyhands.core.devices import accelerator

    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(part.split(":") for part in distributed.get_backend_config().split(","))
    kind = accelerator()
    if wanted == "auto" and kind != "cpu" and backends.get(kind, "gloo") != "gloo":
        chosen = torch.accelerator.current_device_index()
        return (f"{kind}:{chosen}" if chosen else "auto"), backends[kind]
    device = "cpu" if wanted == "auto" else wanted
    return device, backends.get(device.partition(":")[0], str(distributed.get_backend()))


def existing_store() -> Any:
    """The group's store, with names of our own for this use."""
    import torch.distributed as dist

    return own_use(dist.distributed_c10d._get_default_store(), dist.get_rank())


def own_use(store: Any, rank: int, attempt: int = 0) -> Any:
    """A store that outlives our use of it, with names of its own for this one: it keeps what earlier ones wrote."""
    import torch.distributed as dist

    # Each process counts for itself, and all use the store in one order.
    uses = store.add(f"manyhands/uses/{attempt}/{rank}", 1)
    return dist.PrefixStore(f"manyhands/{uses}", store)


def groups() -> list[Any]:
    """All groups of processes that this process is in, in the order in which they were made."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)
