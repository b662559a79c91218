"""VS Code's launch.json: one rank under the debugger while the others run, all on this machine.

For each rank there are two configurations: "rank 1" under debugpy, and a hidden one that runs it alone. The compound
"debug rank 1" starts rank 1 under the debugger and the others without; "debug all ranks" starts all of them under it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from manyhands.cluster.descriptions.command_cluster import joined
from manyhands.cluster.descriptions.command_lines import Command
from manyhands.cluster.descriptions.holding import canonical, must_hold
from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.cluster.descriptions.located_json import Document, Path, dotted, parse, without_comments
from manyhands.cluster.descriptions.torchrun_flags import MODULES, read_command
from manyhands.core.errors import UserError

NAMES = ("launch.json",)
HOST = "localhost"
DEFAULT_PORT = 29500

_OWN_ENVIRONMENT = re.compile(r"\$\{env:([^}]+)\}")
_WRITTEN_BY = '// manyhands: choose "debug rank 0" in Run and Debug. `args` are those of the command manyhands.\n'


def recognise(path: str, text: str) -> bool:
    """Whether it is a JSON object with configurations, or a file of that name."""
    return path.endswith("launch.json") or bool(
        text.lstrip().startswith(("{", "//", "/*"))
        and re.search(r'"configurations"\s*:', text)
        and re.search(r'"request"\s*:', text)
    )


def read(text: str, where: str) -> Cluster:
    """Reads the processes that the configurations start.

    From the RANK and WORLD_SIZE of each, or, where the module is torch.distributed.launch or torch.distributed.run,
    from its flags in `args`. Raises UserError: no configuration has either, ranks are missing, or a value is taken from
    where it can't be.
    """
    document = parse(without_comments(text), where)
    ranks: dict[int, tuple[Path, dict[str, str]]] = {}
    for path, configuration in _configurations(document):
        _check_own_environment(document, path, configuration)
        environment = configuration.get("env") or {}
        if "RANK" in environment:
            ranks.setdefault(_number(document, (*path, "env", "RANK"), environment), (path, environment))
    if not ranks and (started := _by_torchrun(document)):
        return Cluster(**{**vars(started), "source": f"launch.json {where}".rstrip()})
    if not ranks:
        what = "no configuration has RANK and WORLD_SIZE in its env, or starts torch.distributed.launch or .run"
        mend = ("write one: manyhands convert-cluster HOSTFILE --to launch.json",)
        raise UserError(what, document.at(("configurations",)), mend)
    size, port = _agreed(document, ranks, "WORLD_SIZE"), _agreed(document, ranks, "MASTER_PORT")
    if set(ranks) != set(range(size)):
        what = f"WORLD_SIZE is {size}, but there are configurations for ranks {', '.join(map(str, sorted(ranks)))}"
        path, _ = ranks[min(ranks)]
        raise UserError(what, document.at((*path, "env", "WORLD_SIZE")), (f"write one for each of 0 … {size - 1}",))
    devices = _devices(document, [ranks[rank] for rank in range(size)])
    source = f"launch.json {where}".rstrip()
    return canonical(Cluster((Machine(HOST, size, devices),), master_port=port, source=source))


def _by_torchrun(document: Document) -> Cluster | None:
    """The cluster of the configurations that start torchrun, which must agree; None where none does."""
    found: list[tuple[Path, Cluster]] = []
    for path, configuration in _configurations(document):
        program = str(configuration.get("program", "")).removesuffix(".py").replace("/", ".")
        if configuration.get("module") in MODULES or program.endswith(MODULES):
            arguments, environment = configuration.get("args", []), configuration.get("env") or {}
            if not isinstance(arguments, list):
                raise UserError("args is a list of words", document.at((*path, "args")), ("mend it",))
            words = ("torchrun", *map(str, arguments))
            variables = {name: str(value) for name, value in environment.items()}
            command = Command(words, variables, where=document.at((*path, "args")))
            found.append((path, joined([read_command(command)], "--node-rank", "--master-addr")))
    for path, cluster in found[1:]:
        if cluster != found[0][1]:
            what = "this configuration starts other processes than the first one"
            raise UserError(what, document.at(path), ("leave one of them in the file",))
    return found[0][1] if found else None


def write(cluster: Cluster) -> str:
    """Writes a launch.json. Raises UserError: there are several machines, or processes or port aren't known."""
    plain = canonical(cluster)
    machine = plain.machines[0]
    if not plain.master_port:
        raise UserError("launch.json needs the port of rank 0's store", cluster.source, ("give the cluster one",))
    if len(plain.machines) > 1 or not machine.slots:
        what = (
            f"launch.json starts processes on this machine: {len(plain.machines)} machines, {machine.slots} processes"
        )
        raise UserError(what, cluster.source, ("write it from a hostfile with one line: localhost slots=4",))
    ranks = range(machine.slots)
    everyone = [_configuration(rank, machine, plain.master_port) for rank in ranks]
    alone = [
        {**known, "name": f"rank {rank}, not debugged", "noDebug": True, "presentation": {"hidden": True}}
        for rank, known in enumerate(everyone)
    ]
    compounds = [
        {
            "name": f"debug rank {rank}",
            "configurations": [(everyone if other == rank else alone)[other]["name"] for other in ranks],
            "stopAll": True,
        }
        for rank in ranks
    ]
    together = {"name": "debug all ranks", "configurations": [known["name"] for known in everyone], "stopAll": True}
    content = {
        "version": "0.2.0",
        "configurations": [*everyone, *alone],
        "compounds": [*compounds, together] if len(ranks) > 1 else [],
    }
    return must_hold(_WRITTEN_BY + json.dumps(content, indent=2) + "\n", plain, read, "launch.json")


def fit(cluster: Cluster) -> tuple[Cluster, list[str]]:
    size = cluster.size
    notes = []
    if any(machine.address != HOST for machine in cluster.machines):
        notes.append(f"all {size} processes run on this machine: VS Code starts them here")
    own = cluster.machines[0].devices if len(cluster.machines) == 1 else ()
    return Cluster(
        (Machine(HOST, size, own),), master_port=cluster.master_port or DEFAULT_PORT, source=cluster.source
    ), notes


def _configuration(rank: int, machine: Machine, port: int) -> dict[str, Any]:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, machine.devices))} if machine.devices else {}
    return {
        "name": f"rank {rank}",
        "type": "debugpy",
        "request": "launch",
        "module": "manyhands",
        "args": ["train", "job.toml"],
        "env": {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(machine.slots),
            "LOCAL_WORLD_SIZE": str(machine.slots),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **visible,
        },
        "cwd": "${workspaceFolder}",
        "console": "integratedTerminal",
        "justMyCode": False,
    }


def _configurations(document: Document) -> Iterator[tuple[Path, dict[str, Any]]]:
    value = document.value
    listed = value.get("configurations") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise UserError('launch.json is an object with a list "configurations"', document.at(()), ("mend it",))
    for index, configuration in enumerate(listed):
        path: Path = ("configurations", index)
        if not isinstance(configuration, dict) or not isinstance(configuration.get("env") or {}, dict):
            raise UserError(f"{dotted(path)} and its env are objects", document.at(path), ("mend it",))
        yield path, configuration


def _check_own_environment(document: Document, path: Path, configuration: dict[str, Any]) -> None:
    """Refuses ${env:X} of a variable that the same configuration sets: VS Code fills it in before, from its own."""
    own = configuration.get("env") or {}
    for at, text in _texts(configuration, path):
        matched = _OWN_ENVIRONMENT.search(text)
        if matched and matched[1] in own:
            raise UserError(
                f"{matched[0]} is not the {matched[1]} of this configuration's env: VS Code fills it in beforehand, "
                "from the environment that VS Code itself was started in",
                document.at(at),
                (f"write the value itself: {own[matched[1]]}",),
            )


def _agreed(document: Document, ranks: dict[int, tuple[Path, dict[str, str]]], name: str) -> int:
    """A number that all ranks' environments have in common."""
    found = [((*path, "env", name), _number(document, (*path, "env", name), known)) for path, known in ranks.values()]
    _, wanted = found[0]
    for path, number in found:
        if number != wanted:
            what = (
                f"{name} differs between configurations: {number} here, {wanted} in the first; all ranks need the same"
            )
            raise UserError(what, document.at(path), ("correct it",))
    return wanted


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from _texts(inner, (*path, key))


def _number(document: Document, path: Path, environment: dict[str, Any]) -> int:
    name = str(path[-1])
    found = environment.get(name, DEFAULT_PORT if name == "MASTER_PORT" else None)
    if not re.fullmatch(r"[0-9]{1,6}", str(found)):
        _refuse(document, path, f"{name} is {json.dumps(found)}; expected a number" if name in environment else "")
    return int(str(found))


def _refuse(document: Document, path: Path, what: str) -> NoReturn:
    raise UserError(what or f"{path[-1]} is missing", document.at(path), ("each rank needs RANK and WORLD_SIZE",))


def _devices(document: Document, ranks: list[tuple[Path, dict[str, str]]]) -> tuple[int, ...]:
    """Numbers of the devices of all ranks; each sees all of them, and takes the one of its LOCAL_RANK."""
    first = ranks[0][1].get("CUDA_VISIBLE_DEVICES", "")
    for path, environment in ranks:
        text = environment.get("CUDA_VISIBLE_DEVICES", "")
        if text != first or not re.fullmatch(r"([0-9]{1,4}(,[0-9]{1,4})*)?", text):
            what = f'CUDA_VISIBLE_DEVICES is "{text}"; expected numbers such as 0,1, the same for all ranks'
            raise UserError(what, document.at((*path, "env", "CUDA_VISIBLE_DEVICES")), ("correct it",))
    return tuple(int(word) for word in first.split(",")) if first else ()
