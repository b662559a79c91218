"""Reads the YAML file that `accelerate config` writes. Unknown keys are refused, as in accelerate.

The file has only the first machine's address, so the other machines' names are empty. A missing machine_rank stays
unknown: all machines may share one file.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from manyhands.cluster.hosts.inventory import Cluster, Machine, at_line, is_host
from manyhands.core.choices import did_you_mean
from manyhands.core.errors import UserError
from manyhands.core.files import UnreadableError, parse_yaml

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
# Distributed types that all mean data parallel training here.
PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
               "MULTI_HPU", "MULTI_NEURON")  # fmt: skip
OTHER_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
_KEYS = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config", "fp16",
    "dynamo_backend",
}  # fmt: skip


def recognize(_path: str, text: str) -> bool:
    """Returns True for YAML or JSON with the key `distributed_type`, which only accelerate has."""
    return re.search(r"""^["' \t{]*distributed_type["']?\s*:""", text, re.MULTILINE) is not None


def read(text: str, where: str) -> Cluster:
    """Reads accelerate's configuration. Raises UserError if a key is unknown, or a value is wrong or missing."""
    values = _Values(text, where)
    machines, size = values.number("num_machines", 1, 65536) or 1, values.number("num_processes", -1, 65536)
    size = (1 if values.kind == "NO" else -1) if size is None else size
    if size == 0 or (size > 0 and size % machines):
        hint = f"set num_processes to the total over all machines, such as {machines * max(1, size // machines)}"
        message = f"num_processes ({size}) is not a multiple of num_machines ({machines})"
        raise values.error("num_processes", message, hint)
    slots, rank = max(size, 0) // machines, values.number("machine_rank", 0, machines - 1)
    address = values.text("main_process_ip")
    if machines > 1 and not address:
        message = f"num_machines is {machines}, but main_process_ip is missing"
        key = "main_process_ip" if "main_process_ip" in values.lines else "num_machines"
        raise values.error(key, message, "add the first machine's address, such as main_process_ip: 10.0.0.1")
    if address and not is_host(address):
        hint = "write an address such as 10.0.0.1"
        raise values.unexpected_value("main_process_ip", "the first machine's name or address", hint)
    devices, own = _read_devices(values, slots), 0 if machines == 1 else rank
    hosts = [address or "localhost", *[""] * (machines - 1)]
    found = tuple(Machine(host, slots, devices if index == own else ()) for index, host in enumerate(hosts))
    port, source = values.number("main_process_port", 0, 65535) or 0, f"accelerate {where}".rstrip()
    return Cluster(found, port, rank, source, tuple(_job_settings(values)))


def _read_devices(values: "_Values", slots: int) -> tuple[int, ...]:
    """Returns this machine's device indices, by local rank; empty if they are 0, 1, 2 and so on."""
    text = values.text("gpu_ids").strip()
    if text in {"", "all"}:
        return ()
    words = [word.strip() for word in text.strip("[]").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words) or len(set(words)) < len(words):
        raise values.unexpected_value("gpu_ids", "all, or numbers such as 0,1")
    if slots > len(words):
        message = f"gpu_ids has {len(words)} numbers for {slots} processes on this machine"
        raise values.error("gpu_ids", message, "list one device for each process, or write all")
    devices = tuple(int(word) for word in words[:slots] or words)
    return () if devices == tuple(range(slots)) else devices


def _job_settings(values: "_Values") -> Iterator[tuple[str, str, str]]:
    """Yields (setting in the file, key of our option, its value). Key and value are "" if no option matches."""
    if precision := values.text("mixed_precision") or ("fp16" if values.boolean("fp16") else ""):
        ours = PRECISIONS.get(precision, "")
        yield f"mixed_precision: {precision}", "train.precision" if ours else "", ours
    if values.boolean("use_cpu") or values.kind == "MULTI_CPU":
        yield "use_cpu: true", "cluster.device", "cpu"
    if values.kind in OTHER_TYPES:
        ours = values.kind.lower() if values.kind == "FSDP" else ""
        yield f"distributed_type: {values.kind}", "parallel.mode" if ours else "", ours


class _Values:
    """The keys and values of accelerate's file, and the line number of each key."""

    def __init__(self, text: str, where: str) -> None:
        self.where, self.lines = where, dict[str, int]()
        try:
            self._values, node = parse_yaml(text)
        except UnreadableError as error:
            message = f"the file is not valid YAML: {error.problem}"
            raise UserError(message, at_line(where, error.line), ("correct the file",)) from error
        if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, str) for key in self._values):
            hints = ("create a valid file with `accelerate config`",)
            raise UserError("expected lines such as num_processes: 4", where, hints)
        given: dict[str, Any] = {}
        for key, value in node.value:
            self.lines[key.value] = key.start_mark.line + 1
            if given.setdefault(key.value, value.value) != value.value:
                message = f"{key.value} is given twice, with different values"
                raise self.error(key.value, message, "remove one of the lines")
            if key.value not in _KEYS:
                hint = did_you_mean(key.value, _KEYS) or "remove this line"
                raise self.error(key.value, f'accelerate has no key "{key.value}"', hint)
        environment, self.kind = self.text("compute_environment"), self.text("distributed_type")
        if environment not in {"", "LOCAL_MACHINE"}:
            message = f"compute_environment is {environment}; only LOCAL_MACHINE is supported"
            raise self.error("compute_environment", message, 'run `accelerate config` and choose "This machine"')
        if self.kind not in (known := PLAIN_TYPES + OTHER_TYPES):
            message = f'distributed_type "{self.kind}" is unknown' if self.kind else "distributed_type is missing"
            hint = did_you_mean(self.kind, known) or f"write one of {', '.join(known)}"
            raise self.error("distributed_type", message, hint)

    def error(self, key: str, message: str, hint: str) -> UserError:
        return UserError(message, at_line(self.where, self.lines.get(key, 1)), (hint,))

    def unexpected_value(self, key: str, expected: str, hint: str = "correct this value") -> UserError:
        return self.error(key, f'{key} is "{self.text(key)}"; expected {expected}', hint)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if value is False and key in {"distributed_type", "mixed_precision"}:
            return "NO" if key == "distributed_type" else "no"  # YAML reads an unquoted no as false
        return "" if value is None or value == "null" else str(value)

    def boolean(self, key: str) -> bool:
        word = self.text(key).lower()
        if word not in {"", "true", "false", "yes", "no"}:
            raise self.unexpected_value(key, "true or false")
        return word in {"true", "yes"}

    def number(self, key: str, least: int, most: int) -> int | None:
        text = self.text(key)
        if text and (not re.fullmatch(r"-?[0-9]{1,9}", text) or not least <= int(text) <= most):
            hint = "number the machines from 0" if "rank" in key else "correct this value"
            raise self.unexpected_value(key, f"a number from {least} to {most}", hint)
        return int(text) if text else None
