"""Decides how this process takes part: on its own, as one of a launcher's workers, or in a group met by hand."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhands.cluster.inventory import Meeting
from manyhands.config.job import ClusterOptions
from manyhands.core.errors import UserError
from manyhands.core.world import Membership

# What torchrun, torch.distributed.launch and compatible launchers set for each of their workers.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Participation:
    """How this process takes part.

    Attributes:
        membership: its place in a group somebody else formed; None when manyhands starts the processes itself.
        processes: how many manyhands starts on this machine; 0 for one per accelerator.
        meeting: other machines that start their own processes and meet this one's; None for this machine alone.
        origins: what each of these came from, for `manyhands explain`.
    """

    membership: Membership | None
    processes: int = 0
    meeting: Meeting | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def participate(options: ClusterOptions, environment: Mapping[str, str] | None = None) -> Participation:
    """Reads flags first, then a launcher's variables.

    Raises:
        UserError: the flags contradict each other or leave something out.
    """
    variables = os.environ if environment is None else environment
    if options.init and not options.init.startswith("env://"):
        return Participation(_by_hand(options))
    if options.init.startswith("env://") or all(name in variables for name in LAUNCHER_VARIABLES):
        return Participation(_from_environment(options, variables))
    if options.rank >= 0 or options.world_size:
        raise UserError(
            "--rank and --world-size need --init, the place where the processes meet",
            "--init",
            ("--init tcp://ADDRESS_OF_RANK_0:23456", "or -n N for N processes on this machine"),
        )
    return Participation(None, options.processes)


def _by_hand(options: ClusterOptions) -> Membership:
    if options.processes > 1:
        raise UserError(
            "-n starts processes here, and --init joins one process to others",
            "-n",
            ("give each process its own --rank", "or leave out --init"),
        )
    if options.world_size < 1 or options.rank < 0:
        raise UserError(
            "--init needs --world-size and --rank",
            "--init",
            ("--world-size: processes over all machines", "--rank: 0 on one of them, 1 on the next …"),
        )
    _check_rank(options.rank, options.world_size, "--rank", "--world-size")
    return _membership(options, options.rank, options.world_size, started_by="--init")


def _from_environment(options: ClusterOptions, variables: Mapping[str, str]) -> Membership:
    missing = [name for name in LAUNCHER_VARIABLES if name not in variables]
    if missing:
        raise UserError(
            f"env:// needs {', '.join(missing)} in the environment",
            "environment",
            ("export them", "or start with torchrun, or give --init tcp://…"),
        )
    rank, size, local_rank, local_size = (
        _number(variables, name, default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    _check_rank(rank, size, "RANK", "WORLD_SIZE")
    return _membership(
        options,
        rank,
        size,
        local_rank=local_rank,
        local_size=local_size,
        agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        started_by="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment",
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _membership(  # noqa: PLR0913 - one argument for each variable a launcher sets
    options: ClusterOptions,
    rank: int,
    size: int,
    *,
    local_rank: int = 0,
    local_size: int = 1,
    agent_store: bool = False,
    started_by: str = "manyhands",
    attempt: int = 0,
) -> Membership:
    return Membership(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        init=options.init or "env://",
        backend=options.backend,
        device=options.device,
        agent_store=agent_store,
        started_by=started_by,
        join_warn_s=options.join_warn_s,
        join_timeout_s=options.join_timeout_s,
        attempt=attempt,
    )


def worker_membership(options: ClusterOptions, variables: Mapping[str, str]) -> Membership:
    """The place of a process that manyhands' own agent started; the agent serves the store."""
    started = options.model_copy(update={"init": "env://"})
    membership = _from_environment(started, variables)
    return Membership(**{**vars(membership), "started_by": "manyhands"})


def _check_rank(rank: int, size: int, rank_word: str, size_word: str) -> None:
    if not 0 <= rank < size:
        raise UserError(
            f"{rank_word} {rank} is outside 0 … {size - 1}, the ranks of {size_word} {size}",
            rank_word,
            (f"count from 0: the last rank is {size - 1}",),
        )


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise UserError(f'{name} is not a number: "{text}"', "environment", (f"export {name}=0, 1, 2 …",))
    return int(text)
