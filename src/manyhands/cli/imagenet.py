"""The command imagenet, which takes the flags of PyTorch's ImageNet example, main.py, with the same meanings.

`--world-size` and `--rank` count nodes. The recipe imagenet-main sets all other options.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter

from manyhands.cli.flags import Flags, Help, Int, Key, Out, Pretrained, RunFlags, Sync, load
from manyhands.cli.printing import print_config
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.quantities import percentage
from manyhands.core.terminal import say, show
from manyhands.models.published import published_names

if TYPE_CHECKING:
    from manyhands.cluster.hosts.inventory import Rendezvous

RECIPE = "imagenet-main"
NETWORKS = " | ".join(published_names()) or "a torchvision network"

# Flags and options of train in error messages, and main.py's equivalent flags.
_FLAGS = {
    "--init": "--dist-url",
    "remove --device": "remove --gpu",
    "--device cpu": "--no-accel",
    "cluster.device": "--gpu",
    "cluster.backend": "--dist-backend",
}
NODE_BATCH = 256  # main.py's default of -b for each node
# main.py's --dummy: as many random pictures as ImageNet, without augmentation or normalization.
DUMMY = {"data.name": "fake-imagenet", "data.augment": "none", "data.mean": (0.0,), "data.std": (1.0,)}
DUMMY_SIZES = {"inception_v3": 299}  # the only network for pictures of another size, which main.py's --dummy lacks


@dataclass(kw_only=True, eq=False, repr=False)
class ImagenetFlags(Flags):
    """The flags of PyTorch's ImageNet example, main.py; None for a flag that wasn't given."""

    data: Annotated[str | None, Parameter(parse=False)] = None  # the folder with train/ and val/
    arch: Annotated[str | None, Parameter(name=["-a", "--arch"], help=f"{NETWORKS}; default: resnet18")] = None
    workers: Annotated[
        Int | None, Help("data loading processes on this node; default: by CPU cores", "-j", "--workers")
    ] = None
    epochs: Annotated[Int | None, Help("number of epochs; default: 90"), Key("train.epochs")] = None
    start_epoch: Annotated[
        Int | None, Help("number of the first epoch if no checkpoint is loaded"), Key("train.start_epoch")
    ] = None
    batch_size: Annotated[Int | None, Help("samples per update on this node; default: 256", "-b", "--batch-size")] = (
        None
    )
    lr: Annotated[
        float | None,
        Help("learning rate, divided by 10 every 30 epochs; default: 0.1", "--lr", "--learning-rate"),
        Key("train.lr"),
    ] = None
    momentum: Annotated[float | None, Help("momentum of SGD; default: 0.9"), Key("train.momentum")] = None
    weight_decay: Annotated[
        float | None, Help("weight decay; default: 0.0001", "--wd", "--weight-decay"), Key("train.weight_decay")
    ] = None
    print_freq: Annotated[
        Int | None,
        Help("updates between progress lines; default: a live line", "-p", "--print-freq"),
        Key("run.log_steps"),
    ] = None
    resume: Annotated[str | None, Help("checkpoint.pth.tar, run or checkpoint to resume from")] = None
    evaluate: Annotated[bool, Help("evaluate on val/ and exit", "-e", "--evaluate")] = False
    pretrained: Pretrained = None
    world_size: Annotated[Int | None, Help("number of nodes")] = None
    rank: Annotated[Int | None, Help("rank of this node, counted from 0")] = None
    dist_url: Annotated[str | None, Help("rendezvous: tcp://ADDRESS_OF_NODE_0:PORT or env://")] = None
    dist_backend: Annotated[
        str | None, Help("torch.distributed backend: gloo, nccl …; default: by device type"), Key("cluster.backend")
    ] = None
    seed: Annotated[Int | None, Help("seed of all random number generators; default: 0"), Key("train.seed")] = None
    gpu: Annotated[Int | None, Help("index of the only GPU to use")] = None
    no_accel: Annotated[bool, Help("train on the CPU")] = False
    multiprocessing_distributed: Annotated[bool, Help("start one process per accelerator of each node")] = False
    dummy: Annotated[bool, Help("train on random pictures, to measure speed")] = False

    @property
    def folder(self) -> str:
        """The path of the data folder, with a slash, so that it isn't read as the name of a data set."""
        folder = self.data or "imagenet"
        return folder if "/" in folder else f"./{folder}"


@dataclass(frozen=True)
class Nodes:
    """The number of nodes of a run, the rank of this node, and the rendezvous URL."""

    count: int = 1
    rank: int = 0  # rank of this node
    url: str = ""  # the rendezvous; empty for one node


def imagenet(
    data: Annotated[str | None, Help("folder with train/ and val/; default: ./imagenet")] = None,
    /,
    *,
    flags: ImagenetFlags = ImagenetFlags(),
    sync: Sync = None,
    out: Out = None,
    run: RunFlags = RunFlags(),
) -> int:
    """Train with the flags of main.py, the ImageNet example of PyTorch.

    --world-size and --rank count nodes, and -b is the batch size of one node.
    Each epoch writes checkpoint.pth.tar, and each new best epoch model_best.pth.tar, to the working directory.
    Every option of the job is also a flag, such as --train.norm-group local.
    """
    flags = replace(flags, data=data)
    nodes = nodes_of(flags)
    loaded = load(job_values(flags, nodes) | {"run.out": out, "sync.method": sync}, run, recipe=RECIPE)
    if run.show_config:
        return print_config(loaded)
    _check_files(flags, nodes)
    for note in [] if run.quiet else notes(flags, nodes):
        say(note)
    try:
        if flags.evaluate and not run.dry_run:
            from manyhands.cli.evaluate import show_evaluation
            from manyhands.run.tasks import evaluate_job

            found = evaluate_job(loaded.job, Path(flags.resume).expanduser() if flags.resume else None)
            if found and not run.as_json:  # main.py's output line, for scripts that parse it
                show(f" *   Acc@1 {percentage(found['top1'], 3)} Acc@5 {percentage(found['top5'], 3)}")
            if found:
                show_evaluation(found, as_json=run.as_json)
            return 0
        from manyhands.cli.training import run_job

        rendezvous = None
        # Several nodes with several processes each.
        several = nodes.url and flags.multiprocessing_distributed and loaded.job.cluster.device != "cpu"
        if several and not run.dry_run:
            from manyhands.cluster.doctor.accelerators import count_accelerators

            rendezvous = rendezvous_of(nodes, count) if (count := count_accelerators()) > 1 else None
        return run_job(loaded, run, rendezvous=rendezvous)
    except ManyhandsError as error:
        # Errors name main.py's flags in place of train's equivalent flags.
        for ours, theirs in _FLAGS.items():
            error.message, error.where = error.message.replace(ours, theirs), error.where.replace(ours, theirs)
            error.hints = tuple(hint.replace(ours, theirs) for hint in error.hints)
        raise


def _check_files(flags: ImagenetFlags, nodes: Nodes) -> None:
    """Raises UserError before anything starts if the data folder or the checkpoint is missing."""
    folder = Path(flags.folder).expanduser()
    missing = [] if flags.dummy else [str(folder / word) for word in ("train", "val") if not (folder / word).is_dir()]
    if missing:
        hints = ("name a folder with class folders in train/ and val/", "or use --dummy, or manyhands train DIR")
        _refuse(f"there is no folder {' and no folder '.join(missing)}", "DIR", *hints)
    if flags.resume and nodes.rank == 0 and not Path(flags.resume).expanduser().exists():
        _refuse(f"there is no checkpoint at {flags.resume}", "--resume", "name a checkpoint", "or remove --resume")


def nodes_of(flags: ImagenetFlags, environment: Mapping[str, str] | None = None) -> Nodes:
    """Reads the nodes from the flags or, with `--dist-url env://`, from the environment. Raises UserError."""
    variables = os.environ if environment is None else environment
    _check_launcher(flags, variables)
    by_environment = (flags.dist_url or "").startswith("env://")
    # main.py's default of both is -1.
    count, rank = (None if number == -1 else number for number in (flags.world_size, flags.rank))
    asked = count is not None or rank is not None
    if by_environment:
        count = _read_count(variables, "WORLD_SIZE") if count is None else count
        rank = _read_count(variables, "RANK") if rank is None else rank
    _check_rank(count, rank)
    if count in (None, 1) and not by_environment:
        return Nodes()
    return Nodes(count or 1, rank or 0, _rendezvous_url(flags, variables, asked=asked))


def job_values(flags: ImagenetFlags, nodes: Nodes) -> dict[str, Any]:
    """Returns the job options that the flags set, by dotted key; None if not given. Raises UserError for conflicts."""
    _check_conflicts(flags)
    arch = (flags.arch or "").removeprefix("torchvision:")
    # One process on each node, or one for each accelerator of a single node.
    device = "cpu" if flags.no_accel else None if flags.gpu is None else f"auto:{flags.gpu}"
    values = flags.job_values() | {
        "model.name": f"torchvision:{arch}" if arch else None,
        "train.batch": (NODE_BATCH if flags.batch_size is None else flags.batch_size) * nodes.count,
        "checkpoint.resume": flags.resume or None,
        "cluster.device": device,
        **({**DUMMY, "data.image_size": DUMMY_SIZES.get(arch)} if flags.dummy else {"data.name": flags.folder}),
    }
    # Without --multiprocessing-distributed, each of the launcher's processes has -j workers.
    apart = nodes.url == "env://" or not flags.workers
    values["data.workers" if apart else "data.machine_workers"] = flags.workers
    if not nodes.url:
        return values | {"cluster.processes": None if flags.gpu is None else 1}
    values["cluster.init"] = nodes.url
    return values if nodes.url == "env://" else values | {"cluster.world_size": nodes.count, "cluster.rank": nodes.rank}


def rendezvous_of(nodes: Nodes, processes_per_node: int) -> "Rendezvous":
    """Returns this node's rendezvous. Raises UserError if its URL is neither tcp://HOST:PORT nor file://."""
    from manyhands.cluster.hosts.inventory import Rendezvous

    sizes = (processes_per_node,) * nodes.count
    if nodes.url.startswith("file://"):
        return Rendezvous(sizes, nodes.rank, file=nodes.url)
    match = re.fullmatch(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:]+)):(?P<port>\d+)/?", nodes.url)
    if not match:
        what = f"several processes on each node need a tcp:// or file:// URL, found {nodes.url or 'one node'}"
        _refuse(what, "--dist-url", "use --dist-url tcp://ADDRESS_OF_NODE_0:8090", "or --dist-url file:///PATH")
    return Rendezvous(sizes, nodes.rank, match["v6"] or match["name"], int(match["port"]))


def notes(flags: ImagenetFlags, nodes: Nodes) -> list[str]:
    """Returns a sentence for each given flag that does less than in main.py, PyTorch's ImageNet example."""
    found: list[str] = []
    if flags.seed is not None:
        found.append(
            "--seed seeds the initial weights, the sample order and the augmentation; for deterministic cuDNN kernels, "
            "which --seed of main.py selects too, add --train.deterministic"
        )
    if flags.dist_url and not nodes.url:
        found.append("--dist-url has no effect with one node: the processes connect over loopback")
    return found


def _check_launcher(flags: ImagenetFlags, variables: Mapping[str, str]) -> None:
    """Raises UserError if the flags would start processes although torchrun has started them."""
    if "TORCHELASTIC_RUN_ID" not in variables and "LOCAL_WORLD_SIZE" not in variables:
        return
    if flags.multiprocessing_distributed:
        flag = "--multiprocessing-distributed"
        what = f"{flag} starts processes, but torchrun has already started them"
        _refuse(what, flag, f"remove {flag} and add --dist-url env://", "or start without torchrun")
    if not (flags.dist_url or "").startswith("env://"):
        what = "torchrun has started this process, but --dist-url is not env://"
        _refuse(what, "--dist-url", "add --dist-url env://", "or start without torchrun")


def _check_rank(count: int | None, rank: int | None) -> None:
    if count is None and rank is not None:
        _refuse(f"--rank {rank} needs --world-size, the number of nodes", "--rank", "add --world-size 3, for example")
    if count is None:
        return
    if count < 1:
        _refuse(f"--world-size must be 1 or more, found {count}", "--world-size", "give the number of nodes")
    if rank is None and count > 1:
        hints = "add --rank 0 on one node, --rank 1 on the next …"
        _refuse(f"--world-size {count} needs --rank, the number of this node", "--rank", hints)
    if rank is not None and not 0 <= rank < count:
        what = f"--rank {rank} is outside 0 … {count - 1}, the nodes of --world-size {count}"
        _refuse(what, "--rank", f"count nodes from 0: the last node is {count - 1}")


def _rendezvous_url(flags: ImagenetFlags, variables: Mapping[str, str], *, asked: bool) -> str:
    url = flags.dist_url or ""
    if not url:
        what = "several nodes need --dist-url: torch does not support the default of main.py, a multicast address"
        _refuse(what, "--dist-url", "add --dist-url tcp://ADDRESS_OF_NODE_0:8090, the same on every node")
    if re.fullmatch(r"tcp://.+:\d+/?|file:///.+", url):
        return url
    if not url.startswith("env://"):
        _refuse(f'"{url}" is not a rendezvous URL', "--dist-url", "use tcp://ADDRESS:PORT, file:///PATH or env://")
    if not asked and not flags.multiprocessing_distributed:
        return "env://"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        what = f"env:// needs {' and '.join(missing)} in the environment"
        _refuse(what, "environment", "export the missing variables", "or use tcp://ADDRESS:PORT")
    address = variables["MASTER_ADDR"]
    return f"tcp://{f'[{address}]' if ':' in address else address}:{variables['MASTER_PORT']}"


def _check_conflicts(flags: ImagenetFlags) -> None:
    """Raises UserError for flags that contradict each other, which main.py accepts, and for too small values."""
    by_gpu = flags.gpu is not None
    for one, other, both, reason in (
        ("--gpu", "--multiprocessing-distributed", by_gpu and flags.multiprocessing_distributed,
         "the first uses one accelerator, the second all of them"),
        ("--gpu", "--no-accel", by_gpu and flags.no_accel, "the first uses an accelerator, the second the CPU"),
        ("--resume", "--start-epoch", flags.resume and flags.start_epoch, "the checkpoint determines the first epoch"),
        ("--resume", "--pretrained", flags.resume and flags.pretrained, "both set the initial weights"),
        ("--dummy", "DIR", flags.dummy and flags.data is not None,
         "the first trains on random pictures, the second on a folder"),
    ):  # fmt: skip
        if both:
            _refuse(f"{one} and {other} contradict each other: {reason}", one, f"remove {one} or {other}")
    for name, value, least in (
        ("-j", flags.workers, 0), ("-p", flags.print_freq, 1), ("-b", flags.batch_size, 1), ("--gpu", flags.gpu, 0),
        ("--start-epoch", flags.start_epoch, 0),
    ):  # fmt: skip
        if value is not None and value < least:
            _refuse(f"{name} must be {least} or more, found {value}", name, f"use {name} {max(least, 1)}, for example")


def _read_count(variables: Mapping[str, str], name: str) -> int:
    from manyhands.core.files import parse_count

    text = variables.get(name, "")
    if (number := parse_count(text)) is None:
        found = f'found "{text}"' if text else "which isn't set"
        _refuse(f"env:// needs a number in {name}, {found}", "environment", f"export {name} with a whole number")
    return number


def _refuse(what: str, where: str, *hints: str) -> NoReturn:
    raise UserError(what, where, hints)
