"""Finds the machines of a job: in its list of hosts, in files, and in launchers' environment variables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from manyhands.cluster.hosts.inventory import Cluster, Machine, in_brackets
from manyhands.config.job import ClusterOptions
from manyhands.core.choices import load_choice, module_names
from manyhands.core.errors import UserError
from manyhands.core.files import MOST_TEXT_BYTES, decoded, read_bytes

FORMATS = "manyhands.cluster.hosts.formats"


def with_machines(options: ClusterOptions, more: Sequence[Machine]) -> ClusterOptions:
    """Appends machines to the job's hosts or hostfile; returns the options unchanged if the job or `more` has none."""
    named, hosts = machines_of(options), list[str]()
    if not (named and more):
        return options
    for machine in (*named, *more):
        user = machine.host[: -len(machine.address)]
        target = machine.target if machine.port else user + in_brackets(machine.address)
        hosts.append(f"{target} slots={machine.slots}" if machine.slots else target)
    return options.model_copy(update={"hosts": tuple(hosts), "hostfile": ""})


def machines_of(options: ClusterOptions) -> tuple[Machine, ...]:
    """Returns the machines in cluster.hosts or the hostfile, in rank order. Raises UserError: both, or invalid."""
    if options.hosts and options.hostfile:
        raise UserError("both hosts and a hostfile are given", "cluster.hosts", ("remove --hosts or --hostfile",))
    from manyhands.cluster.hosts.formats import hostfile  # not needed in workers, which import this module

    if options.hosts:
        return hostfile.read_list(",".join(options.hosts), "cluster.hosts").machines
    if options.hostfile:
        path = Path(options.hostfile).expanduser()
        return hostfile.read(_read_text(path), str(path)).machines
    return ()


def given_cluster(options: ClusterOptions, variables: Mapping[str, str]) -> tuple[Cluster, str] | None:
    """Reads the cluster file that a flag or RANK_TABLE_FILE names. Returns the cluster and its origin, or None."""
    variable = variables.get("RANK_TABLE_FILE", "")
    named = {"--rank-table": options.rank_table, "--cluster": options.file, "RANK_TABLE_FILE": variable}
    for origin, path in named.items():
        if path:
            return read_cluster(Path(path), options.join_timeout_s), f"{origin} {path}"
    return None


def read_cluster(path: Path, wait_s: float = 0.0) -> Cluster:
    """Reads a cluster file in any known format; waits up to `wait_s` for an incomplete one. Raises UserError."""
    text = _read_text(path)
    module = format_of(str(path), text)
    if wait_s and hasattr(module, "wait"):
        text = module.wait(path, wait_s)
    return module.read(text, str(path))


def _read_text(path: Path) -> str:
    try:
        return decoded(read_bytes(path, MOST_TEXT_BYTES, pipes=True))
    except OSError as error:
        hints = ("check the path and the permissions of the file",)
        raise UserError(f"{path} can't be read: {error.strerror}", str(path), hints) from None
    except ValueError as error:
        hints = (f"use one of the supported formats: {', '.join(readable_formats())}",)
        raise UserError(f"{path} is not a cluster file: {error}", str(path), hints) from None


def format_of(path: str, text: str) -> ModuleType:
    """Returns the module of the file's format. Raises UserError: the format is unknown."""
    formats = readable_formats()
    if found := next((module for module in formats.values() if module.recognise(path, text)), None):
        return found
    message = "the cluster file is in an unknown format" if text.strip() else "the cluster file is empty"
    raise UserError(message, path, (f"use one of the supported formats: {', '.join(formats)}",))


def readable_formats() -> dict[str, ModuleType]:
    """Returns the modules of the formats that files can have, by name."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_with("recognise")}


def modules_with(function: str) -> list[ModuleType]:
    """Returns the formats that define `function`, by ascending `PRECEDENCE`."""
    found = (load_choice(FORMATS, name) for name in module_names(FORMATS))
    defining = (module for module in found if hasattr(module, function))
    return sorted(defining, key=lambda module: getattr(module, "PRECEDENCE", 0))


def described_cluster(variables: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that a launcher's variables describe, such as Kubeflow's PET_*."""
    clusters = (module.from_environment(variables) for module in modules_with("from_environment"))
    return next(filter(None, clusters), None)
