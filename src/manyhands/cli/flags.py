"""Flags that several commands have, each said once."""

from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from manyhands.core.errors import UserError

NAME = Parameter(
    help="a data set (digits, mnist, cifar10 …), a folder of class folders, file.py:function, a job.toml, or your own "
    "training script, such as train.py"
)
MODEL = Parameter(help="a network (mlp, cnn, resnet18 …), torchvision:NAME, or file.py:object")

Data = Annotated[str | None, NAME]
Model = Annotated[str | None, MODEL]
Arguments = Annotated[
    str, Parameter(name="ARGUMENTS", show=True, help="arguments for your script, after --: train.py -n 2 -- --lr 0.1")
]
AT_LEAST_ONE = Number(gte=1)
Processes = Annotated[
    int | None, Parameter(name=["-n", "--processes"], validator=AT_LEAST_ONE, help="processes on this machine")
]
RecipeName = Annotated[
    str | None, Parameter(name="--recipe", help="named settings in place of the data set's own: cifar10-fast")
]
Epochs = Annotated[int | None, Parameter(help="passes over the training data")]
Batch = Annotated[int | None, Parameter(help="samples per update, over all processes")]
Lr = Annotated[float | None, Parameter(help="peak learning rate")]
Seed = Annotated[int | None, Parameter(help="seed of all random numbers")]
DataDir = Annotated[str | None, Parameter(help="folder of the named data sets; default: MANYHANDS_DATA or the cache")]
Parallel = Annotated[
    str | None, Parameter(help="parallel mode: data, fsdp, hybrid, semi, auto, dataparallel or single; default: data")
]
Mesh = Annotated[str | None, Parameter(help="device mesh for hybrid, semi and auto, such as dp=2,tp=2")]
Pin = Annotated[
    list[str] | None, Parameter(name="--pin", negative="", help='sharding of one op, implies semi: "fc=n@dp o@tp"')
]
Elastic = Annotated[
    str | None, Parameter(help="restart after a fault: on, off, or 2:4 (only with 2 to 4 machines); default: on")
]
Sync = Annotated[
    str | None,
    Parameter(help="gradient averaging: allreduce (default), bf16, powersgd, local, or auto (by network speed)"),
]
DebugRank = Annotated[
    int | None, Parameter(help="start this rank under debugpy and wait for VS Code; the launch.json entry is printed")
]
Backend = Annotated[str | None, Parameter(help="communication backend: gloo, nccl, hccl …; default: the device's own")]
Pretrained = Annotated[bool | None, Parameter(negative="", help="start from torchvision's published weights")]
Compile = Annotated[bool | None, Parameter(name="--compile", negative="", help="compile the network (torch.compile)")]
Device = Annotated[str | None, Parameter(help="cpu, cuda, npu …; default: the accelerator if there is one")]
Out = Annotated[str | None, Parameter(help="run folder; an unfinished run in this folder is resumed")]
Resume = Annotated[str | None, Parameter(help="what to resume: auto, never, last, a run, a checkpoint or a .pth.tar")]
Interface = Annotated[str | None, Parameter(help="network interface between machines, or ssh; default: detected")]
Hostfile = Annotated[str | None, Parameter(help="file with one machine per line, such as n1 slots=4")]
Settings = Annotated[
    list[str] | None, Parameter(name="--set", negative="", help="any option of the job, such as train.momentum=0.8")
]
ShowConfig = Annotated[
    bool, Parameter(negative="", help="print every value of the job and where the value comes from, and exit")
]  # fmt: skip
DryRun = Annotated[
    bool,
    Parameter(
        negative="",
        help="check options, names, the layout of the data folder and processes, and exit; pictures, memory, your own "
        "code and other machines are not checked",
    ),
]
AsJson = Annotated[
    bool, Parameter(name="--json", negative="", help="print one JSON object as the last line of stdout")
]  # fmt: skip
Quiet = Annotated[bool, Parameter(name=["-q", "--quiet"], negative="", help="print one line on the job, no progress")]


def settings(words: list[str]) -> dict[str, Any]:
    """`key=value` words as values by dotted key.

    Raises:
        UserError: a word has no "=".
    """
    from manyhands.config.load import parse_value

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f'"{word}" is not key=value', "--set", ("write key=value, such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found
