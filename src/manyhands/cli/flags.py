"""Flags that several commands share, with their help texts and the options of the job that they set."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number

from manyhands.core.choices import module_names
from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.config.load import LoadedJob


class Key(str):
    """The dotted key of the job option that a flag sets."""


def Help(text: str, *names: str) -> Parameter:  # noqa: N802 - used like the class Key
    """Declares a flag with a help text. `names` default to the name of the argument."""
    return Parameter(name=names, help=text) if names else Parameter(help=text)


def _whole_number(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Converts to int. Raises ValueError for `--epochs 1.5`, which cyclopts would round to 2."""
    if any("." in token.value for token in tokens):
        raise ValueError(f'"{tokens[0].value}" is not a whole number')
    return cast(Any, cyclopts.convert(kind, tokens))


# The type of every flag with an integer: a converter of the application doesn't apply to the fields of a dataclass.
Int = Annotated[int, Parameter(converter=_whole_number)]


def _comma_separated(_kind: Any, tokens: Sequence[cyclopts.Token]) -> list[str] | None:
    """Converts `--hosts n1,n2` to a list of machines; None for an empty value."""
    return [name for token in tokens if token.value for name in token.value.split(",")] or None


# The arguments of commands.
Data = Annotated[
    str | None,
    Help(
        "a data set (digits, mnist, cifar10 …), a folder of class folders, file.py:function, a job.toml, or your "
        "own training script, such as train.py"
    ),
]
Model = Annotated[str | None, Help("a network (mlp, cnn, resnet18 …), torchvision:NAME, or file.py:object")]
Arguments = Annotated[
    str, Parameter(name="ARGUMENTS", show=True, help="arguments of your script, after --: train.py -n 2 -- --lr 0.1")
]
RunName = Annotated[str, Help("a run: its folder, a part of its name, or last", "RUN")]
Which = Annotated[Literal["best", "last"], Help("the checkpoint to use if RUN is not itself a checkpoint")]

# Options of the job.
Processes = Annotated[
    Int | None,
    Parameter(name=["-n", "--processes"], validator=Number(gte=1), help="number of processes on this machine"),
    Key("cluster.processes"),
]
Batch = Annotated[Int | None, Help("global batch size: samples per update over all processes"), Key("train.batch")]
Out = Annotated[str | None, Help("run folder; an unfinished run in this folder is resumed"), Key("run.out")]
DataDir = Annotated[
    str | None, Help("folder for named data sets; default: MANYHANDS_DATA or the user's cache folder"), Key("data.dir")
]
Parallel = Annotated[
    str | None,
    Help(f"parallel mode: {', '.join(module_names('manyhands.parallel.modes'))}; default: data"),
    Key("parallel.mode"),
]
Sync = Annotated[
    str | None,
    Help(f"gradient synchronization: {', '.join(module_names('manyhands.sync.methods'))} or auto; default: allreduce"),
    Key("sync.method"),
]
Elastic = Annotated[
    str | None,
    Help("restart after a fault: on (default), off, or 2:4 (only with 2 to 4 machines)"),
    Key("cluster.elastic"),
]
Backend = Annotated[
    str | None, Help("torch.distributed backend: gloo, nccl, hccl …; default: by device type"), Key("cluster.backend")
]
Device = Annotated[
    str | None, Help("device type: cpu, cuda, npu …; default: the accelerator if there is one"), Key("cluster.device")
]
Pretrained = Annotated[bool | None, Help("start from torchvision's pretrained weights"), Key("model.pretrained")]
Compile = Annotated[bool | None, Help("compile the network with torch.compile", "--compile"), Key("train.compile")]
DebugRank = Annotated[
    Int | None,
    Help("rank to start under debugpy, which waits for VS Code to attach; prints the entry for launch.json"),
    Key("cluster.debug_rank"),
]
Interface = Annotated[
    str | None, Help("network interface, or ssh for ssh tunnels; default: detected"), Key("cluster.interface")
]
Hostfile = Annotated[str | None, Help("file with one machine per line, such as n1 slots=4"), Key("cluster.hostfile")]
Hosts = Annotated[list[str] | None, Parameter(n_tokens=1, converter=_comma_separated), Key("cluster.hosts")]
Settings = Annotated[list[str] | None, Help("set any option of the job, such as train.momentum=0.8", "--set")]

# The output of commands.
Json = Annotated[bool, Help("print the result as one JSON object, the last line of stdout", "--json")]
Quiet = Annotated[bool, Help("print one line about the job and no progress", "-q", "--quiet")]


@Parameter(name="*")
@dataclass(kw_only=True, eq=False, repr=False)
class Flags:
    """Base class for groups of flags. cyclopts creates a flag for each field of the dataclass."""

    def job_values(self) -> dict[str, Any]:
        """Returns the job options that the flags set, by dotted key; the value is None for a flag that wasn't given."""
        values = {
            key: getattr(self, field.name)
            for field in fields(self)
            for key in getattr(field.type, "__metadata__", ())
            if isinstance(key, Key)
        }
        return values | settings(getattr(self, "set_", None))


@dataclass(kw_only=True, eq=False, repr=False)
class JobFlags(Flags):
    """The flags of train, launch and profile that set the job."""

    recipe: Annotated[str | None, Help("name of a recipe, such as cifar10-fast; default: by data set")] = None
    epochs: Annotated[Int | None, Help("number of epochs"), Key("train.epochs")] = None
    batch: Batch = None
    lr: Annotated[float | None, Help("peak learning rate"), Key("train.lr")] = None
    seed: Annotated[Int | None, Help("seed of all random number generators"), Key("train.seed")] = None
    out: Out = None
    resume: Annotated[
        str | None,
        Help("run, checkpoint or weights file to resume; last: latest run; auto: unfinished run in --out; never: none"),
    ] = None
    data_dir: DataDir = None
    parallel: Parallel = None
    mesh: Annotated[
        str | None, Help("device mesh for modes hybrid, semi and auto, such as dp=2,tp=2"), Key("parallel.mesh")
    ] = None
    pin: Annotated[
        list[str] | None, Help('sharding of an op: "fc=n@dp o@tp"; selects mode semi'), Key("parallel.pin")
    ] = None  # fmt: skip
    sync: Sync = None
    elastic: Elastic = None
    backend: Backend = None
    device: Device = None
    pretrained: Pretrained = None
    compile_: Compile = None
    debug_rank: DebugRank = None

    def job_values(self) -> dict[str, Any]:
        """Extends `Flags.job_values` by the mode that --pin implies and the run folder that --resume names."""
        from manyhands.parallel.options import MODE_OF_PLANS
        from manyhands.run.registry import resolve_resume

        mode = self.parallel or (MODE_OF_PLANS if self.pin else None)
        return super().job_values() | {"parallel.mode": mode, "checkpoint.resume": resolve_resume(self.resume)}


@dataclass(kw_only=True, eq=False, repr=False)
class ProcessFlags(Flags):
    """The flags of train and explain for the rank and rendezvous of this process."""

    init: Annotated[
        str | None, Help("rendezvous URL: tcp://HOST:PORT, file:///PATH or env://"), Key("cluster.init")
    ] = None
    world_size: Annotated[
        Int | None, Help("number of processes on all machines; used only with --init"), Key("cluster.world_size")
    ] = None
    rank: Annotated[Int | None, Help("rank of this process; used only with --init"), Key("cluster.rank")] = None
    rank_table: Annotated[
        str | None, Help("Ascend rank table that lists this machine"), Key("cluster.rank_table")
    ] = None  # fmt: skip
    cluster: Annotated[str | None, Help("cluster file that lists this machine"), Key("cluster.file")] = None


@dataclass(kw_only=True, eq=False, repr=False)
class RunFlags(Flags):
    """The flags of train, launch, resume, profile and imagenet for --set, dry runs and output."""

    set_: Settings = None
    show_config: Annotated[bool, Help("print each option of the job and the origin of its value, then exit")] = False
    dry_run: Annotated[
        bool,
        Help(
            "check the options, names, data folder layout and processes, print what would be started or submitted, "
            "then exit; does not check pictures, memory, your own code or other machines"
        ),
    ] = False
    as_json: Json = False
    quiet: Quiet = False


@dataclass(kw_only=True, eq=False, repr=False)
class LaunchFlags(Flags):
    """The flags of launch for the machines and their connections."""

    hosts: Annotated[
        Hosts, Help("machines: n1,n2,n3; with 4 processes each: n1:4,n2:4; with an ssh port: ssh://user@n1:31234")
    ] = None  # fmt: skip
    hostfile: Hostfile = None
    on: Annotated[str | None, Help("scheduler to submit the job to: slurm or kubernetes"), Key("cluster.on")] = None
    interface: Interface = None
    relay: Annotated[
        bool | None, Help("connect machines via this machine if they can't log in to each other"), Key("cluster.relay")
    ] = None
    detach: Annotated[
        bool | None, Help("keep training without a terminal or connection to this machine"), Key("cluster.detach")
    ] = None
    sync_code: Annotated[
        bool | None, Help("copy the code in this directory to the other machines first"), Key("cluster.sync_code")
    ] = None


@dataclass(kw_only=True, eq=False, repr=False)
class ResumeFlags(Flags):
    """The flags of resume, which change options of the run."""

    processes: Annotated[Processes, Help("number of processes on this machine; may differ from before")] = None
    epochs: Annotated[
        Int | None, Help("total number of epochs, to train longer than first planned"), Key("train.epochs")
    ] = None
    detach: Annotated[
        bool | None,
        Parameter(
            negative="--no-detach", help="keep training if this terminal closes, as in launch; default: as at launch"
        ),
        Key("cluster.detach"),
    ] = None
    debug_rank: DebugRank = None


@dataclass(kw_only=True, eq=False, repr=False)
class EvaluateFlags(Flags):
    """The flags of eval, which override options of the run."""

    processes: Processes = None
    data_dir: Annotated[str | None, Help("folder for named data sets"), Key("data.dir")] = None
    device: Device = None
    set_: Settings = None


@dataclass(kw_only=True, eq=False, repr=False)
class DoctorFlags(Flags):
    """The flags of doctor, which name the machines to check."""

    hosts: Annotated[
        Hosts, Help("machines to check: n1,n2,n3; with 4 processes each: n1:4,n2:4; default: this machine")
    ] = None
    hostfile: Hostfile = None
    processes: Annotated[
        Int | None, Help("number of processes on each machine", "-n", "--processes"), Key("cluster.processes")
    ] = None
    interface: Interface = None
    set_: Settings = None


@dataclass(kw_only=True, eq=False, repr=False)
class ExplainFlags(ProcessFlags):
    """The flags of explain: rank, rendezvous and device of this process."""

    device: Device = None
    backend: Backend = None
    set_: Settings = None


def settings(words: Sequence[str] | None) -> dict[str, Any]:
    """Parses `key=value` arguments to {key: value}. Raises UserError if "=" or the value is missing."""
    from manyhands.config.load import parse_value

    found: dict[str, Any] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f'"{word}" is not key=value', "--set", ("write key=value, such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found


def parse_names(target: str | None, model: str | None) -> tuple[dict[str, Any], Path | None]:
    """Returns ({"data.name": …, "model.name": …}, path). `path` is None unless `target` is the path of a job.toml."""
    file = Path(target) if target and target.endswith(".toml") else None
    return {"data.name": None if file else target, "model.name": model}, file


def load(values: dict[str, Any], *flags: Flags, file: Path | None = None, recipe: str | None = None) -> "LoadedJob":
    """Builds the job from `values` (by dotted key), which flags override. Later groups override earlier ones."""
    from manyhands.config.load import load_job

    for group in flags:
        values = values | {key: value for key, value in group.job_values().items() if value is not None}
    return load_job(values, file=file, recipe=recipe or "")
