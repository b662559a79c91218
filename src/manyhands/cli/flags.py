"""Flags that several commands have, each said once."""

from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from manyhands.core.errors import UserError

NAME = Parameter(
    help="a data set (digits, mnist, cifar10 …), a folder of class folders, file.py:function, or a job.toml; "
    "or a training script of your own, train.py"
)
MODEL = Parameter(help="a network (mlp, cnn, resnet18 …), torchvision:NAME, or file.py:object")

Data = Annotated[str | None, NAME]
Model = Annotated[str | None, MODEL]
Arguments = Annotated[
    str, Parameter(name="ARGUMENTS", show=True, help="of a script of your own, behind --: train.py -n 2 -- --lr 0.1")
]
AT_LEAST_ONE = Number(gte=1)
Processes = Annotated[
    int | None, Parameter(name=["-n", "--processes"], validator=AT_LEAST_ONE, help="processes on this machine")
]
RecipeName = Annotated[
    str | None, Parameter(name="--recipe", help="settings by name, in place of the data set's own: cifar10-fast")
]
Epochs = Annotated[int | None, Parameter(help="passes over the training data")]
Batch = Annotated[int | None, Parameter(help="samples per update, over all processes")]
Lr = Annotated[float | None, Parameter(help="peak learning rate")]
Seed = Annotated[int | None, Parameter(help="decides every random choice")]
DataDir = Annotated[str | None, Parameter(help="where named data sets lie; or MANYHANDS_DATA")]
Parallel = Annotated[
    str | None, Parameter(help="data, fsdp, hybrid, semi, auto, dataparallel or single; default: data")
]
Mesh = Annotated[str | None, Parameter(help="the processes as a grid: dp=2,tp=2 (for hybrid, semi and auto)")]
Pin = Annotated[
    list[str] | None, Parameter(name="--pin", negative="", help='how an op is split: "fc=n@dp o@tp"; implies semi')
]
Elastic = Annotated[
    str | None,
    Parameter(help="2:4: go on with 2 to 4 machines when some are lost; off: end at the first fault; on"),
]
Sync = Annotated[
    str | None,
    Parameter(help="how gradients are averaged: allreduce, bf16, powersgd, local, or auto by the link; allreduce"),
]
DebugRank = Annotated[
    int | None, Parameter(help="run this rank under debugpy: it waits until VS Code has attached, and prints how")
]
Backend = Annotated[str | None, Parameter(help="gloo, nccl, hccl …; default: the device's own")]
Pretrained = Annotated[bool | None, Parameter(negative="", help="start from torchvision's weights")]
Compile = Annotated[bool | None, Parameter(name="--compile", negative="", help="torch.compile the network")]
Device = Annotated[str | None, Parameter(help="cpu, cuda, npu …; default: the accelerator if there is one")]
Out = Annotated[str | None, Parameter(help="run folder; an unfinished run there goes on")]
Resume = Annotated[str | None, Parameter(help="auto, never, or a run, last, a checkpoint or .pth.tar to resume from")]
Interface = Annotated[str | None, Parameter(help="network interface between the machines; found by trying; or ssh")]
Hostfile = Annotated[str | None, Parameter(help="a file of hosts: n1 slots=4 a line")]
Settings = Annotated[
    list[str] | None, Parameter(name="--set", negative="", help="any option of the job: train.momentum=0.8")
]
ShowConfig = Annotated[
    bool, Parameter(negative="", help="print every value and where it came from; train nothing")
]  # fmt: skip
DryRun = Annotated[
    bool,
    Parameter(
        negative="",
        help="train nothing; check options, names, the data folder's layout and processes; "
        "not whether pictures can be read, memory suffices, own code runs or other machines are ready",
    ),
]
AsJson = Annotated[
    bool, Parameter(name="--json", negative="", help="last line on stdout: one JSON object")
]  # fmt: skip
Quiet = Annotated[bool, Parameter(name=["-q", "--quiet"], negative="", help="one line on what is trained, no progress")]


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
            raise UserError(f'"{word}" is not key=value', "--set", ("such as --set train.lr=0.05",))
        found[key.strip()] = parse_value(value)
    return found
