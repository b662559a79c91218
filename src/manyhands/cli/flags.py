"""Flags of the commands, each defined once: with its help and with the option of the job that it sets.

Flags of one command alone are defined in the command's file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.config.load import LoadedJob


class Key(str):
    """The dotted key of the job's option that a flag sets."""


def _whole_number(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Refuses `--epochs 1.5`, which cyclopts would round to 2."""
    if any("." in token.value for token in tokens):
        raise ValueError(f'"{tokens[0].value}" is not a whole number')
    return cast(Any, cyclopts.convert(kind, tokens))


# The type of every flag that is a whole number: a converter of the application doesn't reach the fields of a dataclass.
Int = Annotated[int, Parameter(converter=_whole_number)]

# What a command works on.
Data = Annotated[
    str | None,
    Parameter(
        help="a data set (digits, mnist, cifar10 …), a folder of class folders, file.py:function, a job.toml, or your "
        "own training script, such as train.py"
    ),
]
Model = Annotated[str | None, Parameter(help="a network (mlp, cnn, resnet18 …), torchvision:NAME, or file.py:object")]
Arguments = Annotated[
    str, Parameter(name="ARGUMENTS", show=True, help="arguments for your script, after --: train.py -n 2 -- --lr 0.1")
]
RunName = Annotated[str, Parameter(name="RUN", help="a run's folder, part of its name, or last")]
Which = Annotated[Literal["best", "last"], Parameter(help="the checkpoint to use if RUN is a run")]

# Options of the job.
Processes = Annotated[
    Int | None,
    Parameter(name=["-n", "--processes"], validator=Number(gte=1), help="processes on this machine"),
    Key("cluster.processes"),
]
Batch = Annotated[Int | None, Parameter(help="samples per update, over all processes"), Key("train.batch")]
Out = Annotated[str | None, Parameter(help="run folder; an unfinished run in this folder is resumed"), Key("run.out")]
DataDir = Annotated[
    str | None, Parameter(help="folder of the named data sets; default: MANYHANDS_DATA or the cache"), Key("data.dir")
]
Parallel = Annotated[
    str | None,
    Parameter(help="parallel mode: data, fsdp, hybrid, semi, auto, dataparallel or single; default: data"),
    Key("parallel.mode"),
]
Sync = Annotated[
    str | None,
    Parameter(help="gradient averaging: allreduce (default), bf16, powersgd, local, or auto (by network speed)"),
    Key("sync.method"),
]
Elastic = Annotated[
    str | None,
    Parameter(help="restart after a fault: on, off, or 2:4 (only with 2 to 4 machines); default: on"),
    Key("cluster.elastic"),
]
Backend = Annotated[
    str | None,
    Parameter(help="communication backend: gloo, nccl, hccl …; default: the device's own"),
    Key("cluster.backend"),
]
Device = Annotated[
    str | None, Parameter(help="cpu, cuda, npu …; default: the accelerator if there is one"), Key("cluster.device")
]
Pretrained = Annotated[
    bool | None, Parameter(negative="", help="start from torchvision's published weights"), Key("model.pretrained")
]
Compile = Annotated[
    bool | None, Parameter(name="--compile", negative="", help="compile the network (torch.compile)"),
    Key("train.compile"),
]  # fmt: skip
DebugRank = Annotated[
    Int | None,
    Parameter(help="start this rank under debugpy and wait for VS Code; the launch.json entry is printed"),
    Key("cluster.debug_rank"),
]
Interface = Annotated[
    str | None,
    Parameter(help="network interface between machines, or ssh; default: detected"),
    Key("cluster.interface"),
]
Hostfile = Annotated[
    str | None, Parameter(help="file with one machine per line, such as n1 slots=4"), Key("cluster.hostfile")
]
Settings = Annotated[
    list[str] | None, Parameter(name="--set", negative="", help="any option of the job, such as train.momentum=0.8")
]

# How a command answers.
Json = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON object")]
JsonAtEnd = Annotated[
    bool, Parameter(name="--json", negative="", help="print one JSON object as the last line of stdout")
]
Quiet = Annotated[bool, Parameter(name=["-q", "--quiet"], negative="", help="print one line on the job, no progress")]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags as fields of a dataclass, of which cyclopts makes a flag each."""

    def job_values(self) -> dict[str, Any]:
        """The job's options that the flags set, by dotted key; None for a flag that wasn't given."""
        values = {
            key: getattr(self, field.name)
            for field in fields(self)
            for key in getattr(field.type, "__metadata__", ())
            if isinstance(key, Key)
        }
        return values | settings(getattr(self, "set_", None))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobFlags(Flags):
    """What is trained and how: flags of train and launch."""

    recipe: Annotated[
        str | None, Parameter(help="named settings in place of the data set's own: cifar10-fast")
    ] = None  # fmt: skip
    epochs: Annotated[Int | None, Parameter(help="passes over the training data"), Key("train.epochs")] = None
    batch: Batch = None
    lr: Annotated[float | None, Parameter(help="peak learning rate"), Key("train.lr")] = None
    seed: Annotated[Int | None, Parameter(help="seed of all random numbers"), Key("train.seed")] = None
    out: Out = None
    resume: Annotated[
        str | None, Parameter(help="what to resume: auto, never, last, a run, a checkpoint or a .pth.tar")
    ] = None
    data_dir: DataDir = None
    parallel: Parallel = None
    mesh: Annotated[
        str | None, Parameter(help="device mesh for hybrid, semi and auto, such as dp=2,tp=2"), Key("parallel.mesh")
    ] = None
    pin: Annotated[
        list[str] | None,
        Parameter(negative="", help='sharding of one op, implies semi: "fc=n@dp o@tp"'),
        Key("parallel.pin"),
    ] = None
    sync: Sync = None
    elastic: Elastic = None
    backend: Backend = None
    device: Device = None
    pretrained: Pretrained = None
    compile_: Compile = None
    debug_rank: DebugRank = None

    def job_values(self) -> dict[str, Any]:
        """As `Flags` has them, with the mode that a pin implies and a run to resume as its folder.

        Raises:
            UserError: no run, or more than one, has the name of --resume.
        """
        from manyhands.parallel.options import MODE_OF_PLANS
        from manyhands.run.find import find_start

        mode = self.parallel or (MODE_OF_PLANS if self.pin else None)
        return super().job_values() | {"parallel.mode": mode, "checkpoint.resume": find_start(self.resume)}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlaceFlags(Flags):
    """The place of this process among others: flags of train and explain."""

    init: Annotated[
        str | None, Parameter(help="rendezvous URL: tcp://HOST:PORT, file:///PATH or env://"), Key("cluster.init")
    ] = None
    world_size: Annotated[
        Int | None, Parameter(help="with --init: number of processes on all machines"), Key("cluster.world_size")
    ] = None
    rank: Annotated[
        Int | None, Parameter(help="with --init: rank of this process, counted from 0"), Key("cluster.rank")
    ] = None
    rank_table: Annotated[
        str | None, Parameter(help="Ascend rank table that lists this machine"), Key("cluster.rank_table")
    ] = None
    cluster: Annotated[str | None, Parameter(help="cluster file that lists this machine"), Key("cluster.file")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags(Flags):
    """More options, and what is printed: flags of train, launch and imagenet."""

    set_: Settings = None
    show_config: Annotated[
        bool, Parameter(negative="", help="print every value of the job and where the value comes from, and exit")
    ] = False
    dry_run: Annotated[
        bool,
        Parameter(
            negative="",
            help="check options, names, the layout of the data folder and processes, and exit; pictures, memory, your "
            "own code and other machines are not checked",
        ),
    ] = False
    as_json: JsonAtEnd = False
    quiet: Quiet = False


def settings(words: Sequence[str] | None) -> dict[str, Any]:
    """`key=value` words as values by dotted key. Raises UserError: a word has no "="."""
    from manyhands.config.load import parse_value

    found: dict[str, Any] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f'"{word}" is not key=value', "--set", ("write key=value, such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found


def named_job(target: str | None, model: str | None) -> dict[str, Any]:
    """The data set and the network that a command line names, by dotted key."""
    return {"data.name": None if job_file(target) else target, "model.name": model}


def job_file(target: str | None) -> Path | None:
    """The job.toml that a command line names in the place of a data set."""
    return Path(target) if target and target.endswith(".toml") else None


def split_hosts(hosts: str | None) -> list[str] | None:
    """The machines of `--hosts n1,n2`."""
    return hosts.split(",") if hosts else None


def load(values: dict[str, Any], *flags: Flags, file: Path | None = None, recipe: str | None = None) -> "LoadedJob":
    """Builds the job from a command line: values by dotted key, then flags, of which the later ones win."""
    from manyhands.config.load import load_job

    for group in flags:
        values = values | group.job_values()
    return load_job(values, file=file, recipe=recipe or "")
