"""The whole job as one typed tree. Each part's own section lies beside the code that reads it."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from manyhands.checkpoint.options import CheckpointOptions
from manyhands.core.choices import did_you_mean
from manyhands.core.options import Options
from manyhands.core.user_code import is_object_reference
from manyhands.data.options import DataOptions
from manyhands.models.options import ModelOptions
from manyhands.parallel.options import ParallelOptions
from manyhands.sync.options import SyncOptions

BUILT_IN_OPTIMIZERS = ("sgd", "adamw")
# Options of the built-in ones; the user's own optimizer sets its own.
OF_BUILT_IN_OPTIMIZERS = ("lr", "momentum", "nesterov", "betas", "weight_decay", "decay_norm_and_bias", "bias_rate")
KEYS_OF_BUILT_IN_OPTIMIZERS = tuple(f"train.{name}" for name in OF_BUILT_IN_OPTIMIZERS)
BUILT_IN_SCHEDULES = ("constant", "step", "cosine", "one-cycle")
# Ten days: longer than anybody debugs, and a time limit that every backend takes.
_DEBUG_TIMEOUT_S = 864_000.0
# Options that a run decides once where they are "auto", by their dotted keys; its job.toml holds the decisions.
MEASURED = ("train.precision", "train.channels_last")
# The value of an option that was an object in Python; object:NAME for one of several.
OBJECT = "object"
# The figures of every evaluation, and which of their values is better.
_BETTER = {"top1": "highest", "top5": "highest", "loss": "lowest"}
BY_TOP1 = "highest top1"
# The figures of an evaluation's record, whose names no metric may have.
_FIGURES: tuple[str, ...] = ("top1", "top5", "loss", "val_loss", "train_loss", "epoch", "evaluated", "best")


class TrainOptions(Options):
    """Options of the training algorithm, independent of the number of processes."""

    epochs: int = Field(default=10, ge=0, le=1_000_000, description="passes over the training data")
    batch: int = Field(default=128, ge=1, description="samples per update over all processes")
    micro_batch: int = Field(
        default=0,
        ge=0,
        description="maximum samples per pass on each process; gradients of several passes accumulate; 0: no limit",
    )
    optimizer: str = Field(
        default="sgd", description="sgd, adamw, or file.py:function that takes the parameters and returns an optimizer"
    )
    lr: float = Field(default=0.05, gt=0.0, description="peak learning rate; your own optimizer sets its own")
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0, description="momentum of sgd")
    nesterov: bool = Field(default=True, description="use Nesterov momentum with sgd")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="betas of adamw")
    weight_decay: float = Field(default=5e-4, ge=0.0, description="weight decay; see also decay_norm_and_bias")
    decay_norm_and_bias: bool = Field(default=False, description="apply weight decay to biases and norms too")
    bias_rate: float = Field(default=1.0, gt=0.0, description="learning rate of biases and norms, as a multiple of lr")
    schedule: str = Field(
        default="cosine",
        description="learning rate schedule: constant, step, cosine, one-cycle, or file.py:function that takes the "
        "step or the optimizer",
    )
    warmup_epochs: float = Field(default=0.0, ge=0.0, description="epochs of linear learning rate warm-up")
    step_epochs: int = Field(
        default=30, ge=1, description="for schedule step: epochs between drops of the learning rate"
    )
    step_factor: float = Field(
        default=0.1, gt=0.0, le=1.0, description="for schedule step: factor of the learning rate at each drop"
    )
    loss: str = Field(default="cross-entropy", description="cross-entropy, nll, or file.py:function")
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0, description="label smoothing of cross-entropy")
    clip: float = Field(default=0.0, ge=0.0, description="largest global norm of the gradients; 0: no clipping")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        default="auto",
        description="bf16 and fp16 use autocast, fp16 with a loss scaler; fp64 is for tests; auto: bf16 if all "
        "machines support bf16 natively and a short measurement shows 1.3 times the speed, else fp32",
    )
    channels_last: bool | Literal["auto"] = Field(
        default="auto",
        description="use the channels_last memory format; auto: if a short measurement shows 1.05 times the speed",
    )
    compile: bool = Field(default=False, description="compile the training passes with torch.compile")
    norm_group: int | Literal["global", "local"] = Field(
        default=32,
        description="number of samples of the global batch in each group that BatchNorm computes statistics of; "
        "global: the whole batch; local: each process's own samples, so that results depend on the number of processes",
    )
    stop_after_bad: int = Field(
        default=3,
        ge=1,
        description="end the run after this many consecutive updates with a non-finite loss or gradient; all processes "
        "skip the updates before; 1: end at the first",
    )
    drop_last: bool = Field(default=False, description="skip the last batch of an epoch if incomplete")
    metrics: tuple[str, ...] = Field(
        default=(),
        description="your own metrics of each evaluation: file.py:name of a function of outputs and labels that "
        "returns one value per sample, or of an object with update and compute",
    )
    best: str = Field(
        default=BY_TOP1,
        description="criterion of the best evaluation, whose weights are kept: highest top1, highest top5, lowest "
        "loss, or highest or lowest and the name of one of your metrics",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of all random numbers")
    deterministic: bool = Field(default=False, description="use only torch's deterministic algorithms")
    evaluate_every: float = Field(default=1.0, ge=0.0, description="epochs between evaluations; 0: only at the end")
    evaluate_batch: int = Field(default=256, ge=1, description="samples per pass of an evaluation")
    evaluate_views: Literal[1, 2, 6] = Field(
        default=1,
        description="views of each picture whose outputs an evaluation averages; 2: the picture and its mirror image; "
        "6: both, also shifted by one pixel toward two corners",
    )
    audit_every: int = Field(default=500, ge=0, description="steps between checks that replicas are equal; 0: never")
    max_steps: int = Field(default=0, ge=0, description="stop after this many updates; 0: no limit")
    start_epoch: int = Field(
        default=0, ge=0, description="number of the epoch to start from if no checkpoint is loaded"
    )

    @property
    def built_in(self) -> bool:
        """True for a built-in optimizer."""
        return self.optimizer in BUILT_IN_OPTIMIZERS

    @property
    def measured_precision(self) -> bool:
        """True if precision or memory format is chosen by measurement."""
        return "auto" in (self.precision, self.channels_last)

    @property
    def custom_code(self) -> tuple[str, ...]:
        """The values that may name objects in the user's code, as file.py:object."""
        return (self.loss, self.optimizer, self.schedule, *self.metrics)

    @property
    def custom_schedule(self) -> bool:
        """True if the schedule is an object in the user's code."""
        return self.schedule not in BUILT_IN_SCHEDULES

    @field_validator("optimizer", "schedule")
    @classmethod
    def _is_known_or_custom(cls, word: str, info: ValidationInfo) -> str:
        known = BUILT_IN_OPTIMIZERS if info.field_name == "optimizer" else BUILT_IN_SCHEDULES
        if word not in {*known, OBJECT} and not is_object_reference(word):
            hint = did_you_mean(word, known)
            raise ValueError(f"should be {', '.join(known)} or file.py:function{hint and f'; {hint}'}")
        return word

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_or_several(cls, words: object) -> object:
        return (words,) if isinstance(words, str) else words

    @field_validator("metrics")
    @classmethod
    def _names_metrics(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        names = list(_FIGURES)
        for word in words:
            kind, _, name = word.rpartition(":")
            if not is_object_reference(word) and not (kind == OBJECT and name.isidentifier()):
                raise ValueError("should be a list of file.py:function")
            if name in names:
                raise ValueError(f"the name {name} belongs to another metric")
            names.append(name)
        return words

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainOptions":
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
    """Processes and machines of a run, and how they connect."""

    processes: int = Field(default=0, ge=0, le=1024, description="processes here; 0: one per accelerator, else one")
    init: str = Field(
        default="", pattern=r"^($|tcp://.+|file://.+|env://.*)", description="rendezvous URL: tcp://, file:// or env://"
    )
    world_size: int = Field(default=0, ge=0, description="with init: processes on all machines")
    rank: int = Field(default=-1, ge=-1, description="with init: rank of this process")
    backend: str = Field(default="auto", description="collectives: gloo, nccl, hccl, xccl …; auto: the device's own")
    device: str = Field(default="auto", description="cpu, cuda, npu, xpu, mps; auto: the accelerator if there is one")
    threads: int = Field(default=0, ge=0, description="CPU threads for each process; 0: cores divided by processes")
    hosts: tuple[str, ...] = Field(
        default=(), description='machines to launch on, over ssh: "n1", "user@n2:4", "ssh://user@n3:31234"'
    )
    hostfile: str = Field(default="", description='file of machines to launch on, one per line: "n1 slots=4 port=22"')
    file: str = Field(default="", description="cluster file, in any supported format (--cluster FILE)")
    rank_table: str = Field(default="", description="Ascend rank table that lists this machine")
    on: Literal["", "slurm", "kubernetes"] = Field(default="", description="submit the job to this scheduler")
    shares: Literal["machines", "equal", "auto"] | tuple[int, ...] = Field(
        default="machines",
        description="samples of each update per process: a list by rank that adds up to train.batch, such as [24, 8]; "
        "auto: in proportion to the measured speeds; machines: auto if machines differ in kind, else equal",
    )
    interface: str = Field(
        default="",
        description="network interface between the machines; empty: detected; ssh: tunnels through ssh, between "
        "machines that can log in to each other",
    )
    relay: bool = Field(
        default=False, description="connect machines that can't log in to each other through the launching machine"
    )
    detach: bool = Field(
        default=False, description="keep training when the terminal closes or the launching machine goes down"
    )
    ssh: str = Field(default="ssh", description="ssh command, with any options")
    python: str = Field(default="", description="Python on the other machines; empty: detected")
    workdir: str = Field(default="", description="working folder on the other machines; empty: the same as here")
    sync_code: bool = Field(default=False, description="copy the code in this folder to the other machines")
    elastic: str = Field(
        default="on",
        description="restart automatically after losing a process or a machine; off: end the run; 2:4: restart with "
        "two to four machines only",
    )
    join_warn_s: float = Field(default=30.0, gt=0.0, description="seconds until missing processes are named")
    join_timeout_s: float = Field(default=600.0, gt=0.0, description="seconds to wait for missing processes")
    collective_timeout_s: float = Field(default=600.0, gt=0.0, description="seconds a collective waits for a peer")
    debug_rank: int = Field(default=-1, ge=-1, description="start this rank under debugpy; -1: none")
    debug_port: int = Field(default=5678, ge=1, le=65535, description="port of debugpy on 127.0.0.1")

    def mark_flags(self, names: Iterable[str]) -> None:
        """Records which options were given by a flag or a Python argument; not part of the stored job."""
        object.__setattr__(self, "flags", frozenset(names))

    @cached_property
    def flags(self) -> frozenset[str]:
        """Names of the options that were given by a flag or a Python argument."""
        return frozenset()

    @property
    def recovers(self) -> bool:
        """True if the run restarts automatically after a fault."""
        return self.elastic != "off" and not self.debugging

    @property
    def debugging(self) -> bool:
        """True if a debugger can suspend a rank."""
        return self.debug_rank >= 0

    @property
    def peer_timeout_s(self) -> float:
        """The timeout of collectives, in seconds."""
        return _DEBUG_TIMEOUT_S if self.debugging else self.collective_timeout_s

    @property
    def through_ssh(self) -> bool:
        """True if the processes of different machines must connect through ssh."""
        return self.interface == "ssh"

    @property
    def machines_wanted(self) -> range:
        """The numbers of machines with which the run may start or continue."""
        least, _, most = self.elastic.partition(":")
        return range(int(least) if least.isdecimal() else 1, int(most or 10_000) + 1)

    @field_validator("elastic")
    @classmethod
    def _is_elastic(cls, given: str) -> str:
        least, colon, most = given.partition(":")
        numbers = [int(one) for one in (least, most) if re.fullmatch(r"[1-9]\d{0,3}", one)]
        if given not in {"on", "off"} and (len(numbers) != 1 + bool(colon) or numbers != sorted(numbers)):
            raise ValueError("should be on, off, a minimum number of machines (2), or a range (2:4)")
        return given

    @field_validator("shares", mode="before")
    @classmethod
    def _are_shares(cls, given: object) -> object:
        """Raises ValueError: one sentence, where pydantic has one for each kind."""
        if given in ("machines", "equal", "auto"):
            return given
        numbers: list[object] = list(cast(Any, given)) if isinstance(given, list | tuple) else []
        if not numbers or not all(type(one) is int and one > 0 for one in numbers):
            raise ValueError("should be machines, equal, auto, or a list of one whole number per process: [24, 8]")
        return tuple(numbers)


class SubmitOptions(Options):
    """Resources requested from a scheduler (`launch --on`)."""

    nodes: int = Field(default=1, ge=1, le=100_000, description="number of machines")
    accelerators: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="accelerators to request per machine; 0: one per process if --device names a type",
    )
    time_limit: str = Field(
        default="",
        pattern=r"^[0-9:-]*$",
        description="Slurm time limit: minutes, H:MM:SS or D-HH; the next job resumes the run",
    )
    options: tuple[str, ...] = Field(default=(), description='more options of sbatch: "--partition=gpu"')
    image: str = Field(default="", description="Kubernetes: container image with manyhands and the data")
    kind: Literal["TrainJob", "PyTorchJob"] = Field(
        default="TrainJob", description="Kubernetes: resource of Kubeflow Trainer, or of the older training operator"
    )
    runtime: str = Field(default="torch-distributed", description="Kubernetes: runtime of a TrainJob")
    namespace: str = Field(default="", description="Kubernetes namespace; empty: the current one")


class RunOptions(Options):
    """Run folder, progress records and report."""

    out: str = Field(default="", description="run folder; empty: runs/<date>-<data>-<model>")
    log_every_s: float = Field(
        default=0.5,
        gt=0.0,
        le=60.0,
        description="seconds between progress records, and between checks for a stop request",
    )
    log_steps: int = Field(
        default=0, ge=0, description="print a line at the first update of an epoch and every N updates; 0: by time"
    )
    report: bool = Field(default=True, description="write report.html at the end")
    trace_steps: int = Field(
        default=0, ge=0, le=1000, description="record a trace of this many updates (trace.json), then end; 0: no trace"
    )
    script: tuple[str, ...] = Field(
        default=(), description="your own training script and its arguments, run in place of the built-in training"
    )


class Job(Options):
    """The complete configuration of a run.

    Flags win over the environment, the environment over job.toml, job.toml over a recipe, a recipe over defaults.
    """

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
    def _fits_together(self) -> "Job":
        optimizer, schedule = self.train.optimizer, self.train.schedule
        if self.checkpoint.pth_tar and (optimizer != "sgd" or schedule not in {"constant", "step"}):
            raise ValueError(
                f"checkpoint.pth_tar writes files for main.py, which supports sgd with the step schedule only, not "
                f"{optimizer} with {schedule}; to write no such files, add --set 'checkpoint.pth_tar=\"\"'"
            )
        if self.checkpoint.pth_tar and self.train.best != BY_TOP1:
            raise ValueError(f"checkpoint.pth_tar writes files for main.py, whose best is the {BY_TOP1}; remove best")
        return self
