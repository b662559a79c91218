"""manyhands imagenet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from manyhands.cli import imagenet_flags as main_py
from manyhands.cli.flags import AsJson, DryRun, Out, Quiet, Settings, ShowConfig, Sync, settings
from manyhands.cli.imagenet_flags import ImagenetFlags, Nodes
from manyhands.core.errors import ManyhandsError, UserError
from manyhands.core.quantities import percentage
from manyhands.core.terminal import say, show
from manyhands.models.published import published_names

if TYPE_CHECKING:
    from manyhands.cluster.hosts.inventory import Rendezvous
    from manyhands.config.load import LoadedJob

RECIPE = "imagenet-main"
NETWORKS = " | ".join(published_names()) or "a torchvision network"

# train's flags and options, and what main.py calls them.
_FLAGS = {
    "--init": "--dist-url",
    "remove --device": "remove --gpu",
    "--device cpu": "--no-accel",
    "cluster.device": "--gpu",
    "cluster.backend": "--dist-backend",
}


def imagenet(  # noqa: PLR0913 - one argument for each flag
    data: Annotated[str | None, Parameter(help="folder with train/ and val/; default: imagenet")] = None,
    /,
    *,
    arch: Annotated[str | None, Parameter(name=["-a", "--arch"], help=f"{NETWORKS}; default: resnet18")] = None,
    workers: Annotated[
        int | None, Parameter(name=["-j", "--workers"], help="data loading processes of this node; default: by cores")
    ] = None,
    epochs: Annotated[int | None, Parameter(help="passes over the training data; default: 90")] = None,
    start_epoch: Annotated[int | None, Parameter(help="number of the first epoch, without a checkpoint")] = None,
    batch_size: Annotated[
        int | None, Parameter(name=["-b", "--batch-size"], help="samples per update of this node; default: 256")
    ] = None,
    lr: Annotated[
        float | None, Parameter(name=["--lr", "--learning-rate"], help="divided by 10 every 30 epochs; default: 0.1")
    ] = None,
    momentum: Annotated[float | None, Parameter(help="default: 0.9")] = None,
    weight_decay: Annotated[float | None, Parameter(name=["--wd", "--weight-decay"], help="default: 0.0001")] = None,
    print_freq: Annotated[
        int | None, Parameter(name=["-p", "--print-freq"], help="updates between lines; default: a live line")
    ] = None,
    resume: Annotated[str | None, Parameter(help="resume from checkpoint.pth.tar, a run or a checkpoint")] = None,
    evaluate: Annotated[
        bool, Parameter(name=["-e", "--evaluate"], negative="", help="evaluate on val/ and exit")
    ] = False,
    pretrained: Annotated[bool, Parameter(negative="", help="start from torchvision's published weights")] = False,
    world_size: Annotated[int | None, Parameter(help="number of nodes")] = None,
    rank: Annotated[int | None, Parameter(help="rank of this node, counted from 0")] = None,
    dist_url: Annotated[str | None, Parameter(help="rendezvous: tcp://ADDRESS_OF_NODE_0:PORT or env://")] = None,
    dist_backend: Annotated[str | None, Parameter(help="backend: gloo, nccl …; default: the device's own")] = None,
    seed: Annotated[int | None, Parameter(help="seed of all random numbers; default: 0")] = None,
    gpu: Annotated[int | None, Parameter(help="use only this GPU")] = None,
    no_accel: Annotated[bool, Parameter(negative="", help="use the CPU")] = False,
    multiprocessing_distributed: Annotated[
        bool, Parameter(negative="", help="with several nodes: start one process per accelerator")
    ] = False,
    dummy: Annotated[bool, Parameter(negative="", help="train on random pictures, to measure speed")] = False,
    sync: Sync = None,
    out: Out = None,
    set_: Settings = None,
    show_config: ShowConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train with the flags of main.py, the ImageNet example of PyTorch.

    --world-size and --rank count nodes, and -b is the batch of one node. At the end of each epoch checkpoint.pth.tar
    and, if it is the best, model_best.pth.tar are written into the current folder. Every option of the job can be
    given by its path too, such as --train.norm-group local.
    """
    from manyhands.config.load import load_job

    flags = ImagenetFlags(
        data=data, arch=arch, workers=workers, epochs=epochs, start_epoch=start_epoch, batch_size=batch_size, lr=lr,
        momentum=momentum, weight_decay=weight_decay, print_freq=print_freq, resume=resume, evaluate=evaluate,
        pretrained=pretrained, world_size=world_size, rank=rank, dist_url=dist_url, dist_backend=dist_backend,
        seed=seed, gpu=gpu, no_accel=no_accel, multiprocessing_distributed=multiprocessing_distributed, dummy=dummy,
    )  # fmt: skip
    nodes = main_py.nodes_of(flags)
    values = {**main_py.job_values(flags, nodes), "run.out": out, "sync.method": sync, **settings(set_ or [])}
    loaded = load_job(values, recipe=RECIPE)
    if show_config:
        from manyhands.cli.show_config import print_config

        print_config(loaded)
        return 0
    _check_files(flags, nodes)
    for note in [] if quiet else main_py.notes(flags, nodes):
        say(note)
    try:
        if evaluate and not dry_run:
            return _evaluate(loaded, flags, as_json=as_json)
        from manyhands.cli.training import run

        rendezvous = None if dry_run else _rendezvous(flags, nodes, loaded)
        return run(loaded, dry_run=dry_run, as_json=as_json, quiet=quiet, rendezvous=rendezvous)
    except ManyhandsError as error:
        error.message, error.where, *hints = map(_in_flags_of_main_py, (error.message, error.where, *error.hints))
        error.hints = tuple(hints)
        raise


def _in_flags_of_main_py(text: str) -> str:
    """Names the flags that were typed here, in place of those that train has for the same."""
    for ours, theirs in _FLAGS.items():
        text = text.replace(ours, theirs)
    return text


def _check_files(flags: ImagenetFlags, nodes: Nodes) -> None:
    """Refuses, before anything starts, a data folder or a file that isn't there."""
    folder = Path(main_py.folder_of(flags)).expanduser()
    missing = [] if flags.dummy else [str(folder / word) for word in ("train", "val") if not (folder / word).is_dir()]
    if missing:
        hints = ("name a folder with class folders in train/ and val/", "or use --dummy, or manyhands train DIR")
        raise UserError(f"there is no folder {' and no folder '.join(missing)}", "DIR", hints)
    if flags.resume and nodes.rank == 0 and not Path(flags.resume).expanduser().exists():
        raise UserError(
            f"there is no checkpoint at {flags.resume}", "--resume", ("name a checkpoint", "or remove --resume")
        )


def _rendezvous(flags: ImagenetFlags, nodes: Nodes, loaded: "LoadedJob") -> "Rendezvous | None":
    """What several processes on each of several nodes meet by; None where each node has one process."""
    if not nodes.url or not flags.multiprocessing_distributed or loaded.job.cluster.device == "cpu":
        return None
    from manyhands.cluster.doctor.accelerators import count_accelerators

    count = count_accelerators()
    return main_py.rendezvous_of(flags, count) if count > 1 else None


def _evaluate(loaded: "LoadedJob", flags: ImagenetFlags, *, as_json: bool) -> int:
    from manyhands.cli.evaluate import show_evaluation
    from manyhands.run.tasks import evaluate_job

    path = Path(flags.resume).expanduser() if flags.resume else None
    found: dict[str, Any] | None = evaluate_job(loaded.job, path)
    if found:
        if not as_json:
            # main.py's own line, for scripts that look for it.
            show(f" *   Acc@1 {percentage(found['top1'], 3)} Acc@5 {percentage(found['top5'], 3)}")
        show_evaluation(found, as_json=as_json)
    return 0
