"""The job: all options of a run, as pydantic models. Some sections are defined in the packages that use them."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from manyhands.checkpoint.options import CheckpointOptions
from manyhands.core import choices, user_code
from manyhands.core.options import Options, option
from manyhands.data.options import DataOptions
from manyhands.models.options import ModelOptions
from manyhands.parallel.options import ParallelOptions
from manyhands.sync.options import SyncOptions

BUILT_IN_OPTIMIZERS = ("sgd", "adamw")
# Options of the built-in optimizers; a custom optimizer sets its own.
OF_BUILT_IN_OPTIMIZERS = ("lr", "momentum", "nesterov", "betas", "weight_decay", "decay_norm_and_bias", "bias_rate")
KEYS_OF_BUILT_IN_OPTIMIZERS = tuple(f"train.{name}" for name in OF_BUILT_IN_OPTIMIZERS)
BUILT_IN_SCHEDULES = ("constant", "step", "cosine", "one-cycle")
_DEBUG_TIMEOUT_S = 864_000.0  # ten days: longer than a debugging session, and accepted by every backend
# Options that a run decides once if they are "auto", by dotted key; job.toml records the decisions.
MEASURED = ("train.precision", "train.channels_last")
OBJECT = "object"  # stored for an option that was an object in Python; object:NAME for one of several
# Figures of every evaluation, and which of their values is better.
_BETTER = {"top1": "highest", "top5": "highest", "loss": "lowest"}
BY_TOP1 = "highest top1"
# Keys of an evaluation's record, which no metric may use as a name.
_FIGURES: tuple[str, ...] = ("top1", "top5", "loss", "val_loss", "train_loss", "epoch", "evaluated", "best")


class TrainOptions(Options):
    """Options of the training algorithm, independent of the number of processes."""

    epochs: int = option(10, "number of passes over the training data", ge=0, le=1_000_000)
    batch: int = option(128, "size of the global batch: samples per update over all processes", ge=1)
    micro_batch: int = option(
        0,
        "maximum size of a micro-batch on each process; if a process has more samples per update, it accumulates "
        "gradients over several micro-batches; 0: no limit",
        ge=0,
    )
    optimizer: str = option("sgd", "sgd, adamw, or file.py:function that takes the parameters and returns an optimizer")
    lr: float = option(0.05, "peak learning rate of sgd and adamw; an optimizer of your own has its own rate", gt=0.0)
    momentum: float = option(0.9, "momentum of sgd", ge=0.0, lt=1.0)
    nesterov: bool = option(True, "use Nesterov momentum with sgd")
    betas: tuple[float, float] = option((0.9, 0.999), "beta coefficients of adamw")
    weight_decay: float = option(
        5e-4,
        "weight decay of sgd and adamw; applies to biases and normalization layers only with decay_norm_and_bias",
        ge=0.0,
    )
    decay_norm_and_bias: bool = option(False, "apply weight decay to biases and normalization layers too")
    bias_rate: float = option(1.0, "learning rate of biases and normalization layers, as a multiple of lr", gt=0.0)
    schedule: str = option(
        "cosine",
        "learning rate schedule: constant, step, cosine, one-cycle, or file.py:function that takes the update number "
        "or the optimizer",
    )
    warmup_epochs: float = option(0.0, "number of epochs of linear learning rate warm-up", ge=0.0)
    step_epochs: int = option(30, "epochs between drops of the learning rate; used only with schedule step", ge=1)
    step_factor: float = option(
        0.1, "multiplier of the learning rate at each drop; used only with schedule step", gt=0.0, le=1.0
    )
    loss: str = option("cross-entropy", "loss function: cross-entropy, nll, or file.py:function of outputs and labels")
    label_smoothing: float = option(0.0, "label smoothing of the cross-entropy loss", ge=0.0, lt=1.0)
    clip: float = option(0.0, "maximum global norm to which gradients are clipped; 0: no clipping", ge=0.0)
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = option(
        "auto",
        "numeric precision; bf16: autocast; fp16: autocast with a loss scaler; fp64: for tests; auto: bf16 if all "
        "machines support it natively and a short measurement shows a speedup of at least 1.3, else fp32",
    )
    channels_last: bool | Literal["auto"] = option(
        "auto", "use the channels_last memory format; auto: if a short measurement shows a speedup of at least 1.05"
    )
    compile: bool = option(False, "compile the network for training with torch.compile")
    norm_group: int | Literal["global", "local"] = option(
        32,
        "BatchNorm statistics are computed over groups of this many samples of the global batch; global: over the "
        "whole batch; local: over the samples of each process, so that results depend on the number of processes",
    )
    stop_after_bad: int = option(
        3,
        "number of consecutive updates with a non-finite loss or gradient after which the run ends; before that, such "
        "updates are skipped on all processes; 1: end at the first",
        ge=1,
    )
    drop_last: bool = option(False, "drop the last batch of each epoch if it is incomplete")
    metrics: tuple[str, ...] = option(
        (),
        "additional evaluation metrics, written file.py:name; each is a function of outputs and labels that returns "
        "one value per sample, or an object with the methods update and compute",
    )
    best: str = option(
        BY_TOP1,
        "criterion for the best checkpoint: highest top1, highest top5, lowest loss, or highest NAME or lowest NAME, "
        "where NAME is one of your metrics",
    )
    seed: int = option(0, "seed of all random number generators", ge=0, lt=2**63)
    deterministic: bool = option(False, "use only deterministic algorithms of torch")
    evaluate_every: float = option(1.0, "number of epochs between evaluations; 0: evaluate only at the end", ge=0.0)
    evaluate_batch: int = option(256, "batch size for evaluation on each process", ge=1)
    evaluate_views: Literal[1, 2, 6] = option(
        1,
        "test-time augmentation: number of views of each picture whose outputs are averaged; 2: the picture and its "
        "mirror image; 6: also these two shifted by one pixel toward two opposite corners",
    )
    audit_every: int = option(500, "number of updates between checks that the replicas are equal; 0: no checks", ge=0)
    max_steps: int = option(0, "maximum number of updates; 0: no limit", ge=0)
    start_epoch: int = option(0, "number of the first epoch, counted from 0, if no checkpoint is loaded", ge=0)

    @property
    def built_in(self) -> bool:
        """True if the optimizer is built in (sgd or adamw), False if it is user code."""
        return self.optimizer in BUILT_IN_OPTIMIZERS

    @property
    def measured_precision(self) -> bool:
        return "auto" in (self.precision, self.channels_last)

    @property
    def custom_code(self) -> tuple[str, ...]:
        """The values of all options that accept user code; a value is file.py:object or a built-in name."""
        return (self.loss, self.optimizer, self.schedule, *self.metrics)

    @property
    def custom_schedule(self) -> bool:
        return self.schedule not in BUILT_IN_SCHEDULES

    @field_validator("optimizer", "schedule")
    @classmethod
    def _validate_choice(cls, word: str, info: ValidationInfo) -> str:
        known = BUILT_IN_OPTIMIZERS if info.field_name == "optimizer" else BUILT_IN_SCHEDULES
        if word not in {*known, OBJECT} and not user_code.is_object_reference(word):
            hint = choices.did_you_mean(word, known)
            raise ValueError(f"should be {', '.join(known)} or file.py:function{hint and f'; {hint}'}")
        return word

    @field_validator("metrics", mode="before")
    @classmethod
    def _as_tuple(cls, words: object) -> object:
        return (words,) if isinstance(words, str) else words

    @field_validator("metrics")
    @classmethod
    def _validate_metrics(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        names = list(_FIGURES)
        for word in words:
            kind, _, name = word.rpartition(":")
            if not user_code.is_object_reference(word) and not (kind == OBJECT and name.isidentifier()):
                raise ValueError("should be a list of file.py:function")
            if name in names:
                raise ValueError(f"the name {name} is already in use")
            names.append(name)
        return words

    @model_validator(mode="after")
    def _validate_combination(self) -> "TrainOptions":
        if isinstance(self.norm_group, int) and self.norm_group < 2:
            raise ValueError("norm_group must be at least 2 samples: BatchNorm needs a variance")
        if (self.schedule == "one-cycle" or self.custom_schedule) and self.warmup_epochs:
            which = "a schedule of your own" if self.custom_schedule else self.schedule
            raise ValueError(f"{which} includes its own warm-up; remove warmup_epochs")
        if self.start_epoch > self.epochs:
            raise ValueError(f"start_epoch {self.start_epoch} is greater than epochs {self.epochs}")
        criteria = [f"{way} {name}" for name, way in _BETTER.items()]
        criteria += [f"{way} {word.rpartition(':')[2]}" for word in self.metrics for way in ("highest", "lowest")]
        if self.best not in criteria:
            raise ValueError(f'best should be one of: {", ".join(criteria)}; found "{self.best}"')
        return self


class ClusterOptions(Options):
    """Options of the processes, machines and connections of a run."""

    processes: int = option(
        0, "processes on this machine; 0: one per accelerator, or one if there is no accelerator", ge=0, le=1024
    )
    init: str = option("", "rendezvous URL: tcp://, file:// or env://", pattern=r"^($|tcp://.+|file://.+|env://.*)")
    world_size: int = option(0, "number of processes on all machines; used only with init", ge=0)
    rank: int = option(-1, "rank of this process; used only with init", ge=-1)
    backend: str = option(
        "auto", "torch.distributed backend: gloo, nccl, hccl, xccl …; auto: the default for the device"
    )
    device: str = option("auto", "device type: cpu, cuda, npu, xpu or mps; auto: the accelerator if there is one")
    threads: int = option(0, "CPU threads per process; 0: CPU cores divided by the processes on the machine", ge=0)
    hosts: tuple[str, ...] = option(
        (), 'machines to launch on, over ssh: "n1", "user@n2:4" for 4 processes, "ssh://user@n3:31234" for an ssh port'
    )
    hostfile: str = option("", 'file that lists the machines to launch on, one per line, such as "n1 slots=4 port=22"')
    file: str = option("", "cluster file that lists this machine, in any supported format (--cluster FILE)")
    rank_table: str = option("", "Ascend rank table that lists this machine")
    on: Literal["", "slurm", "kubernetes"] = option("", "scheduler to submit the job to; empty: none")
    shares: Literal["machines", "equal", "auto"] | tuple[int, ...] = option(
        "machines",
        "how the global batch is divided among processes: a list of samples per rank that adds up to train.batch, "
        "such as [24, 8]; equal: the same for each; auto: in proportion to the measured speed of each process; "
        "machines: auto if the machines have different hardware, else equal",
    )
    interface: str = option(
        "",
        "network interface for connections between machines; empty: detected; ssh: connect through ssh tunnels "
        "(the machines must be able to log in to each other, unless relay is set)",
    )
    relay: bool = option(
        False, "with ssh tunnels, connect machines through the launching machine if they can't log in to each other"
    )
    detach: bool = option(False, "keep training after the terminal closes or the launching machine is lost")
    ssh: str = option("ssh", "ssh command, including its options")
    python: str = option("", "Python interpreter on the other machines; empty: detected")
    workdir: str = option("", "working directory on the other machines; empty: the same path as here")
    sync_code: bool = option(False, "copy the code in the current directory to the other machines")
    elastic: str = option(
        "on",
        "on: restart automatically after losing a process or a machine; off: end the run instead; 2: restart only "
        "with two or more machines; 2:4: only with two to four",
    )
    join_warn_s: float = option(30.0, "seconds to wait before logging which processes have not joined", gt=0.0)
    join_timeout_s: float = option(600.0, "seconds to wait for all processes to join before giving up", gt=0.0)
    collective_timeout_s: float = option(600.0, "timeout of collectives in seconds", gt=0.0)
    debug_rank: int = option(-1, "rank to start under debugpy; -1: none", ge=-1)
    debug_port: int = option(5678, "port for debugpy on 127.0.0.1", ge=1, le=65535)

    def mark_flags(self, names: Iterable[str]) -> None:
        """Records the names of options that a flag or a Python argument has set. job.toml doesn't store the names."""
        object.__setattr__(self, "flags", frozenset(names))

    @cached_property
    def flags(self) -> frozenset[str]:
        return frozenset()

    @property
    def recovers(self) -> bool:
        return self.elastic != "off" and not self.debugging

    @property
    def debugging(self) -> bool:
        return self.debug_rank >= 0

    @property
    def peer_timeout_s(self) -> float:
        """The timeout of collectives in seconds, longer under a debugger."""
        return _DEBUG_TIMEOUT_S if self.debugging else self.collective_timeout_s

    @property
    def through_ssh(self) -> bool:
        return self.interface == "ssh"

    @property
    def machines_wanted(self) -> range:
        """The range of machine counts with which the run may start or restart, from cluster.elastic."""
        least, _, most = self.elastic.partition(":")
        return range(int(least) if least.isdecimal() else 1, int(most or 10_000) + 1)

    @field_validator("elastic")
    @classmethod
    def _validate_elastic(cls, given: str) -> str:
        least, colon, most = given.partition(":")
        numbers = [int(one) for one in (least, most) if re.fullmatch(r"[1-9]\d{0,3}", one)]
        if given not in {"on", "off"} and (len(numbers) != 1 + bool(colon) or numbers != sorted(numbers)):
            raise ValueError("should be on, off, a minimum number of machines (2), or a range (2:4)")
        return given

    @field_validator("shares", mode="before")
    @classmethod
    def _validate_shares(cls, given: object) -> object:
        """Validates cluster.shares. Raises one ValueError, whereas pydantic raises one for each type of the union."""
        if given in ("machines", "equal", "auto"):
            return given
        numbers: list[object] = list(cast(Any, given)) if isinstance(given, list | tuple) else []
        if not numbers or not all(type(one) is int and one > 0 for one in numbers):
            raise ValueError("should be machines, equal, auto, or a list of one whole number per process: [24, 8]")
        return tuple(numbers)


class SubmitOptions(Options):
    """Resources to request from Slurm or Kubernetes (`launch --on`)."""

    nodes: int = option(1, "number of machines", ge=1, le=100_000)
    accelerators: int = option(
        0,
        "number of accelerators to request per machine; 0: one per process if --device is an accelerator, else none",
        ge=0,
        le=1024,
    )
    time_limit: str = option(
        "",
        "Slurm time limit as minutes, H:MM:SS or D-HH; the job is requeued to resume an unfinished run",
        pattern=r"^[0-9:-]*$",
    )
    options: tuple[str, ...] = option((), 'additional options of sbatch, such as "--partition=gpu"')
    image: str = option("", "container image that contains manyhands and the data; used only with Kubernetes")
    kind: Literal["TrainJob", "PyTorchJob"] = option(
        "TrainJob", "Kubernetes resource to create: TrainJob (Kubeflow Trainer) or PyTorchJob (older training operator)"
    )
    runtime: str = option("torch-distributed", "training runtime of the TrainJob; used only with Kubernetes")
    namespace: str = option("", "Kubernetes namespace; empty: the current namespace")


class RunOptions(Options):
    """Options of the run folder, the progress records and the report."""

    out: str = option("", "run folder; empty: runs/<date>-<data>-<model>")
    log_every_s: float = option(
        0.5, "seconds between progress records and checks for Ctrl-C, SIGTERM and manyhands stop", gt=0.0, le=60.0
    )
    log_steps: int = option(
        0, "print a progress line at the first update of an epoch and every N updates; 0: at time intervals", ge=0
    )
    report: bool = option(True, "write report.html at the end of the run")
    trace_steps: int = option(
        0, "record a trace of this many updates in trace.json, then end the run; 0: no trace", ge=0, le=1000
    )
    script: tuple[str, ...] = option(
        (), "training script of your own and its arguments, run instead of the built-in training"
    )


class Job(Options):
    """The complete configuration of a run. Sources, by precedence: flags, environment, job.toml, recipe, defaults."""

    data: DataOptions = Field(default_factory=DataOptions)
    model: ModelOptions = Field(default_factory=ModelOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    parallel: ParallelOptions = Field(default_factory=ParallelOptions)
    sync: SyncOptions = Field(default_factory=SyncOptions)
    cluster: ClusterOptions = Field(default_factory=ClusterOptions)
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions)
    submit: SubmitOptions = Field(default_factory=SubmitOptions)
    run: RunOptions = Field(default_factory=RunOptions)

    @model_validator(mode="after")
    def _validate_combination(self) -> "Job":
        optimizer, schedule = self.train.optimizer, self.train.schedule
        if self.checkpoint.pth_tar and (optimizer != "sgd" or schedule not in {"constant", "step"}):
            raise ValueError(
                f"checkpoint.pth_tar is for PyTorch's ImageNet example, main.py, which needs sgd with schedule "
                f"step or constant, not {optimizer} with {schedule}; to write none, add --set 'checkpoint.pth_tar=\"\"'"
            )
        if self.checkpoint.pth_tar and self.train.best != BY_TOP1:
            raise ValueError(
                f"for PyTorch's ImageNet example, main.py, checkpoint.pth_tar needs best '{BY_TOP1}'; remove train.best"
            )
        return self
