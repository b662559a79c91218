"""What a head has the agent of one machine start; travels as JSON."""

from dataclasses import dataclass, field
from typing import Any

# The variable that tells a worker the number of its device.
DEVICE_INDEX = "MANYHANDS_DEVICE_INDEX"
PRELOAD = ("manyhands.worker.preload",)


@dataclass(frozen=True)
class Orders:
    """One generation of workers, as one machine has to know it.

    Attributes:
        entry: "module:function", called in each worker with `argument`; with a script the module that runs it.
        argument: plain data for it.
        logs: folder for each worker's own output, <rank>.log; ranks/ of the run folder.
        sizes: processes on each machine; 0 for one per accelerator of this machine, or one.
        machine: this machine's place in `sizes`.
        device: "auto", "cpu" or the kind of accelerator.
        threads: CPU threads for each process; 0 divides this machine's cores.
        generation: counts the starts of a run's processes.
        address: where the store listens, on the first machine.
        port: of the store; 0 for a free one.
        environment: variables for the workers.
        devices: numbers of the devices of this machine's processes; empty for 0, 1, 2 …
        script: the user's own training script and its words; empty where `entry` is called.
        preload: modules to import before CPU workers are forked, so that they start at once.
    """

    entry: str
    argument: dict[str, Any]
    logs: str
    sizes: list[int]
    machine: int = 0
    device: str = "auto"
    threads: int = 0
    generation: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict[str, str])
    devices: list[int] = field(default_factory=list[int])
    script: list[str] = field(default_factory=list[str])
    preload: list[str] = field(default_factory=lambda: list(PRELOAD))
