"""The yaml that `accelerate config` writes. Unknown keys are refused, as accelerate does.

The file knows the first machine's address alone, so the other machines' names are empty. A machine_rank that is left
out stays unknown: one file may serve all machines, each with its own --machine_rank.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from manyhands.cluster.descriptions.holding import canonical, must_hold
from manyhands.cluster.descriptions.inventory import Cluster, Machine, is_host
from manyhands.cluster.descriptions.located_json import at_line
from manyhands.core.errors import UserError
from manyhands.core.outside import UnreadableError, parse_yaml

NAMES = ("accelerate",)

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
# What is trained the same way here, whatever accelerate calls the accelerator.
PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
               "MULTI_HPU", "MULTI_NEURON")  # fmt: skip
OTHER_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
_KNOWN = (
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines "
    "gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function "
    "enable_cpu_affinity fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config "
    "mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env "
    "dynamo_config fp16 dynamo_backend "
)
_KEYS = frozenset(_KNOWN.split())
_MOST_PROCESSES = 65536


def recognise(_path: str, text: str) -> bool:
    """Whether it is yaml (or JSON) with a key that only accelerate has."""
    found = set(re.findall(r"""^["' \t{]*([a-z_]+)["']?\s*:""", text, re.MULTILINE))
    return "distributed_type" in found


def read(text: str, where: str) -> Cluster:
    """Reads accelerate's configuration. Raises UserError: a key is unknown, or a value is wrong or missing."""
    values = _Values(text, where)
    machines = values.number("num_machines", 1, _MOST_PROCESSES, 1)
    slots = _slots(values, machines)
    rank = values.number("machine_rank", 0, machines - 1, None)
    address = values.text("main_process_ip")
    if machines > 1 and not address:
        what = f"num_machines is {machines}, and main_process_ip doesn't say where the first one is"
        raise UserError(what, values.at("main_process_ip", "num_machines"), ("add main_process_ip: ITS_ADDRESS",))
    if address and not is_host(address):
        what = f"main_process_ip is {address}; expected the first machine's name or address"
        raise UserError(what, values.at("main_process_ip"), ("write it as 10.0.0.1",))
    devices = _devices(values, slots)
    hosts = [address or "localhost", *[""] * (machines - 1)]
    own = 0 if machines == 1 else rank
    return canonical(
        Cluster(
            tuple(Machine(host, slots, devices if index == own else ()) for index, host in enumerate(hosts)),
            master_port=values.number("main_process_port", 0, 65535, 0) or 0,
            machine=rank,
            source=f"accelerate {where}".rstrip(),
        )
    )


def settings(text: str, where: str = "") -> dict[str, str]:
    """What the file says of the job, by the job's own dotted keys. Raises UserError: it asks for what isn't here."""
    values = _Values(text, where)
    found: dict[str, str] = {}
    precision = values.text("mixed_precision") or ("fp16" if values.switch("fp16") else "")
    if precision and precision not in PRECISIONS:
        what = f'mixed_precision is "{precision}"; expected one of {", ".join(PRECISIONS)}'
        raise UserError(what, values.at("mixed_precision"), ("choose one of these; fp8 is not to be had here",))
    if precision:
        found["train.precision"] = PRECISIONS[precision]
    kind = values.text("distributed_type")
    if values.switch("use_cpu") or kind == "MULTI_CPU":
        found["cluster.device"] = "cpu"
    if kind == "FSDP":
        found["parallel.mode"] = kind.lower()  # which is our name for it too
    elif kind not in PLAIN_TYPES:
        what = f"distributed_type is {kind}, which manyhands does not have"
        mend = (
            "for a network that is split over processes: distributed_type: FSDP",
            "else: MULTI_GPU, MULTI_CPU or NO",
        )
        raise UserError(what, values.at("distributed_type"), mend)
    return found


def write(cluster: Cluster) -> str:
    """Writes a configuration, with mixed_precision "no". Raises UserError: it can't hold this cluster."""
    plain = canonical(cluster)
    first = plain.machines[0]
    several = len(plain.machines) > 1
    own = plain.machines[0 if not several else plain.machine or 0]
    size = len(plain.machines) * first.slots if all(m.slots for m in plain.machines) else -1
    address = plain.master_address or ("" if first.host == "localhost" else first.host)
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if size > 1 or several else "NO",
        "num_machines": len(plain.machines),
        "num_processes": size,
        "machine_rank": plain.machine,
        "main_process_ip": address or None,
        "main_process_port": plain.master_port or None,
        "gpu_ids": ",".join(map(str, own.devices)) or "all",
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
    }
    kept = {key: value for key, value in content.items() if value is not None}
    return must_hold(yaml.safe_dump(kept, sort_keys=False), plain, read, "accelerate's configuration")


def fit(cluster: Cluster) -> tuple[Cluster, list[str]]:
    first, *others = cluster.machines
    notes = []
    if any(machine.host for machine in others):
        notes.append(
            "names of machines but the first are left out; start each with its own --machine_rank: "
            + ", ".join(f"{rank} on {machine.name}" for rank, machine in enumerate(others, 1) if machine.host)
        )
    if not all(machine.slots for machine in cluster.machines):
        notes.append("how many processes there are is not known: give accelerate launch --num_processes")
    address = cluster.master_address or first.address
    if address != first.host:
        notes.append(f"the first machine goes by the address {address}: the file has no place for {first.host}")
    keep_devices = not others or cluster.machine is not None
    if not keep_devices and any(machine.devices for machine in cluster.machines):
        notes.append("numbers of devices are left out: the file has them for the machine alone that it lies on")
    machines = [Machine(address, first.slots, first.devices)] + [Machine("", m.slots, m.devices) for m in others]
    own = 0 if not others else cluster.machine
    kept = tuple(m if keep_devices and index == own else Machine(m.host, m.slots) for index, m in enumerate(machines))
    return Cluster(kept, "", cluster.master_port, cluster.machine, cluster.source), notes


class _Values:
    """The file's keys, each with its line."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self._values, self._lines = _parsed(text, where)
        unknown = [key for key in self._values if key not in _KEYS]
        if unknown:
            near = get_close_matches(unknown[0], _KEYS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else "remove it: accelerate doesn't know it either"
            raise UserError(f'accelerate has no key "{unknown[0]}"', self.at(unknown[0]), (hint,))
        self._check_kinds()

    def at(self, *keys: str) -> str:
        """File and line of the first of these keys that is there."""
        line = next((self._lines[key] for key in keys if key in self._lines), 1)
        return at_line(self.where, line)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if value is False and key in {"distributed_type", "mixed_precision"}:
            return "NO" if key == "distributed_type" else "no"  # yaml takes an unquoted no for false
        return "" if value is None or value == "null" else str(value)

    def switch(self, key: str) -> bool:
        value = self._values.get(key)
        if value in (None, True, False):
            return bool(value)
        if str(value).lower() in {"yes", "true", "no", "false"}:
            return str(value).lower() in {"yes", "true"}
        raise UserError(f'{key} is "{value}"; expected true or false', self.at(key), ("correct it",))

    def number(self, key: str, least: int, most: int, otherwise: int | None) -> Any:
        if not self.text(key):
            return otherwise
        text = self.text(key)
        if not re.fullmatch(r"-?[0-9]{1,9}", text) or not least <= int(text) <= most:
            what = f"{key} is {text}; expected a number from {least} to {most}"
            raise UserError(what, self.at(key), ("ranks of machines count from 0" if "rank" in key else "correct it",))
        return int(text)

    def _check_kinds(self) -> None:
        environment = self.text("compute_environment") or "LOCAL_MACHINE"
        if environment != "LOCAL_MACHINE":
            what = f"compute_environment is {environment}; only LOCAL_MACHINE describes machines of one's own"
            raise UserError(what, self.at("compute_environment"), ("run `accelerate config` and choose this machine",))
        kind = self.text("distributed_type")
        known = (*PLAIN_TYPES, *OTHER_TYPES)
        if kind not in known:
            what = f'distributed_type is "{kind}"' if kind else "distributed_type is missing"
            near = get_close_matches(kind.upper(), known, n=1)
            mend = f'did you mean "{near[0]}"?' if near else f"one of {', '.join(known)}"
            raise UserError(what, self.at("distributed_type"), (mend,))


def _parsed(text: str, where: str) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    try:
        content, node = parse_yaml(text)
    except UnreadableError as error:
        line = re.match(r"line ([0-9]+):? ", str(error))
        at = at_line(where, int(line[1])) if line else where
        problem = str(error)[line.end() :] if line else str(error)
        raise UserError(f"this is not yaml: {problem}", at, ("mend this line",)) from error
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, str) for key in content):
        raise UserError("expected lines such as num_processes: 4", where, ("`accelerate config` writes such a file",))
    lines: dict[str, int] = {}
    given: dict[str, Any] = {}
    for key, value in node.value:
        if given.setdefault(key.value, value.value) != value.value:
            at = at_line(where, key.start_mark.line + 1)
            raise UserError(f"{key.value} is given twice, with different values", at, ("keep one of the two",))
        lines[key.value] = key.start_mark.line + 1
    return content, lines


def _slots(values: _Values, machines: int) -> int:
    """Processes on each machine; 0 where num_processes is left to the launcher."""
    size = values.number("num_processes", -1, _MOST_PROCESSES, 1 if values.text("distributed_type") == "NO" else -1)
    if size == 0:
        raise UserError("num_processes is 0", values.at("num_processes"), ("write the number over all machines",))
    if size > 0 and size % machines:
        raise UserError(
            f"num_processes is {size}, not a multiple of num_machines, which is {machines}",
            values.at("num_processes"),
            (f"num_processes counts those of all machines: {machines * max(1, size // machines)} or another multiple",),
        )
    return max(size, 0) // machines


def _devices(values: _Values, slots: int) -> tuple[int, ...]:
    text = values.text("gpu_ids").strip()
    if text in {"", "all"}:
        return ()
    words: Sequence[str] = [word.strip() for word in text.strip("[]").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words) or len(set(words)) < len(words):
        what = f'gpu_ids is "{text}"; expected all, or numbers such as 0,1'
        raise UserError(what, values.at("gpu_ids"), ("correct it",))
    if slots > len(words):
        what = f"gpu_ids has {len(words)} numbers for {slots} processes on this machine"
        raise UserError(what, values.at("gpu_ids"), ("give each process its own, or write all",))
    return tuple(int(word) for word in words[:slots] or words)
