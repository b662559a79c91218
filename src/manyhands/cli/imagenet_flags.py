"""The flags of pytorch/examples' imagenet main.py, with its meanings: `--world-size` and `--rank` count nodes.

What they leave open is the recipe imagenet-main.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.core.errors import UserError
from manyhands.core.files import typed_number

# main.py's default of -b, which each node has.
NODE_BATCH = 256
# What main.py's --dummy makes: as many pictures as ImageNet has, without augmentation or normalisation.
DUMMY = {"data.name": "fake-imagenet", "data.augment": "none", "data.mean": (0.0,), "data.std": (1.0,)}
# The network of torchvision that takes pictures of another size alone; main.py's made ones don't fit it.
DUMMY_SIZES = {"inception_v3": 299}
_NOT_GIVEN = -1


@dataclass(frozen=True)
class ImagenetFlags:
    """main.py's flags as they were given; None where one wasn't."""

    data: str | None = None  # the folder with train/ and val/
    arch: str | None = None
    workers: int | None = None  # decoding processes of one node
    epochs: int | None = None
    start_epoch: int | None = None
    batch_size: int | None = None  # of one node
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    print_freq: int | None = None
    resume: str | None = None
    evaluate: bool = False
    pretrained: bool = False
    world_size: int | None = None  # nodes; -1 as main.py's own default
    rank: int | None = None  # this node; -1 as main.py's own default
    dist_url: str | None = None
    dist_backend: str | None = None
    seed: int | None = None
    gpu: int | None = None  # the one accelerator to use
    no_accel: bool = False
    multiprocessing_distributed: bool = False
    dummy: bool = False  # pictures made by chance instead of a folder


@dataclass(frozen=True)
class Nodes:
    """This node among all."""

    count: int = 1  # how many there are
    rank: int = 0  # this one
    url: str = ""  # where they meet; empty for one node


def nodes_of(flags: ImagenetFlags, environment: Mapping[str, str] | None = None) -> Nodes:
    """This node, by the flags, or the environment with `--dist-url env://`. Raises UserError: they contradict."""
    variables = os.environ if environment is None else environment
    _check_launcher(flags, variables)
    by_environment = (flags.dist_url or "").startswith("env://")
    count, rank = (_given(flags.world_size), _given(flags.rank))
    asked = count is not None or rank is not None
    if by_environment:
        count = _number(variables, "WORLD_SIZE") if count is None else count
        rank = _number(variables, "RANK") if rank is None else rank
    _check_place(count, rank)
    if count in (None, 1) and not by_environment:
        return Nodes()
    return Nodes(count or 1, rank or 0, _url(flags, variables, asked=asked))


def job_values(flags: ImagenetFlags, nodes: Nodes) -> dict[str, Any]:
    """The job that the flags mean, by dotted key; None where they say nothing. Raises UserError: they contradict."""
    _check_together(flags)
    arch = (flags.arch or "").removeprefix("torchvision:")
    values = {
        "model.name": f"torchvision:{arch}" if arch else None,
        "model.pretrained": flags.pretrained or None,
        "train.epochs": flags.epochs,
        "train.start_epoch": flags.start_epoch,
        "train.batch": (NODE_BATCH if flags.batch_size is None else flags.batch_size) * nodes.count,
        "train.lr": flags.lr,
        "train.momentum": flags.momentum,
        "train.weight_decay": flags.weight_decay,
        "train.seed": flags.seed,
        "run.log_steps": flags.print_freq,
        "checkpoint.resume": flags.resume or None,
        **({**DUMMY, "data.image_size": DUMMY_SIZES.get(arch)} if flags.dummy else {"data.name": folder_of(flags)}),
    }
    # Without --multiprocessing-distributed each of a launcher's processes has -j workers of its own.
    apart = nodes.url == "env://" or not flags.workers
    values["data.workers" if apart else "data.machine_workers"] = flags.workers
    return {**values, **_cluster_values(flags, nodes)}


def rendezvous_of(
    flags: ImagenetFlags, processes_per_node: int, environment: Mapping[str, str] | None = None
) -> Rendezvous:
    """This node among the others, each with so many processes of its own. Raises UserError: they couldn't meet."""
    nodes = nodes_of(flags, environment)
    sizes = (processes_per_node,) * nodes.count
    if nodes.url.startswith("file://"):
        return Rendezvous(sizes, nodes.rank, file=nodes.url)
    match = re.fullmatch(r"tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:]+)):(?P<port>\d+)/?", nodes.url)
    if not match:
        _refuse(
            f"several processes on each node need a tcp:// or file:// URL, found {nodes.url or 'one node'}",
            "--dist-url",
            "use --dist-url tcp://ADDRESS_OF_NODE_0:8090",
            "or --dist-url file:///PATH",
        )
    return Rendezvous(sizes, nodes.rank, match["v6"] or match["name"], int(match["port"]))


def folder_of(flags: ImagenetFlags) -> str:
    """The data folder, written so that no name of a data set is meant."""
    folder = flags.data or "imagenet"
    return folder if "/" in folder else f"./{folder}"


def notes(flags: ImagenetFlags, nodes: Nodes) -> list[str]:
    """What a user of main.py should know: where a flag does less here, or nothing."""
    found: list[str] = []
    if flags.seed is not None:
        found.append(
            "--seed seeds the initial weights, the sample order and the augmentation; for deterministic cuDNN kernels, "
            "which --seed of main.py selects too, add --train.deterministic"
        )
    if flags.dist_url and not nodes.url:
        found.append("--dist-url has no effect with one node: the processes connect over loopback")
    return found


def _cluster_values(flags: ImagenetFlags, nodes: Nodes) -> dict[str, Any]:
    """One process on each node, or one for each accelerator of a single node."""
    device = "cpu" if flags.no_accel else None if flags.gpu is None else f"auto:{flags.gpu}"
    values = {"cluster.device": device, "cluster.backend": flags.dist_backend}
    if not nodes.url:
        return {**values, "cluster.processes": None if flags.gpu is None else 1}
    if nodes.url == "env://":
        return {**values, "cluster.init": nodes.url}
    return {**values, "cluster.init": nodes.url, "cluster.world_size": nodes.count, "cluster.rank": nodes.rank}


def _check_launcher(flags: ImagenetFlags, variables: Mapping[str, str]) -> None:
    """Refuses to start processes within, or beside, those that torchrun has started."""
    if "TORCHELASTIC_RUN_ID" not in variables and "LOCAL_WORLD_SIZE" not in variables:
        return
    if flags.multiprocessing_distributed:
        _refuse(
            "--multiprocessing-distributed starts processes, but torchrun has already started them",
            "--multiprocessing-distributed",
            "remove --multiprocessing-distributed and add --dist-url env://",
            "or start without torchrun",
        )
    if not (flags.dist_url or "").startswith("env://"):
        _refuse(
            "torchrun has started this process, but --dist-url is not env://",
            "--dist-url",
            "add --dist-url env://",
            "or start without torchrun",
        )


def _check_place(count: int | None, rank: int | None) -> None:
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


def _url(flags: ImagenetFlags, variables: Mapping[str, str], *, asked: bool) -> str:
    """Where several nodes meet, in the words of `--init`."""
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


def _check_together(flags: ImagenetFlags) -> None:
    """Refuses pairs of which main.py would drop one without a word."""
    both = {
        ("--gpu", "--multiprocessing-distributed"): "the first uses one accelerator, the second all of them",
        ("--gpu", "--no-accel"): "the first uses an accelerator, the second the CPU",
        ("--resume", "--start-epoch"): "the checkpoint determines the first epoch",
        ("--resume", "--pretrained"): "both set the initial weights",
        ("--dummy", "DIR"): "the first trains on random pictures, the second on a folder",
    }
    given = {
        "--gpu": flags.gpu is not None,
        "--multiprocessing-distributed": flags.multiprocessing_distributed,
        "--no-accel": flags.no_accel,
        "--resume": bool(flags.resume),
        "--start-epoch": bool(flags.start_epoch),
        "--pretrained": flags.pretrained,
        "--dummy": flags.dummy,
        "DIR": flags.data is not None,
    }
    for (one, other), reason in both.items():
        if given[one] and given[other]:
            _refuse(f"{one} and {other} contradict each other: {reason}", one, f"remove {one} or {other}")
    for name, value, least in (
        ("-j", flags.workers, 0),
        ("-p", flags.print_freq, 1),
        ("-b", flags.batch_size, 1),
        ("--gpu", flags.gpu, 0),
        ("--start-epoch", flags.start_epoch, 0),
    ):
        if value is not None and value < least:
            _refuse(f"{name} must be {least} or more, found {value}", name, f"use {name} {max(least, 1)}, for example")


def _given(number: int | None) -> int | None:
    return None if number == _NOT_GIVEN else number


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if (number := typed_number(text)) is None:
        found = f'found "{text}"' if text else "which isn't set"
        _refuse(f"env:// needs a number in {name}, {found}", "environment", f"export {name} with a whole number")
    return number


def _refuse(what: str, where: str, *hints: str) -> NoReturn:
    raise UserError(what, where, hints)
