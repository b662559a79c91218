"""What the processes of a run wrote: their own files in the run folder, as they are or as they grow."""

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from manyhands.cluster.agents.assemble import assembled
from manyhands.cluster.agents.connection import AgentConnection
from manyhands.cluster.agents.protocol import ReadLog
from manyhands.cluster.doctor.questions import FactsWanted
from manyhands.cluster.hosts.inventory import Machine
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job, written_values
from manyhands.core.errors import UserError
from manyhands.core.files import open_file, parse_json, read_bytes
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch
from manyhands.run.registry import head_of, is_running, remembered_reach

POLL_S = 0.2
ANSWER_S = 20.0
# More than any cluster has; a damaged machines.json may say anything, and each rank is asked for its file.
MOST_RANKS, MOST_PER_MACHINE = 1_000_000, 4096


class LogPlace(BaseModel):
    """Where the logs of one machine's processes are."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    host: str  # the machine
    port: int = Field(default=0, ge=0, le=65535)  # of its ssh; 0 for what ssh itself takes
    # its first rank and how many it has
    ranks: tuple[Annotated[int, Field(ge=0, le=MOST_RANKS)], Annotated[int, Field(ge=0, le=MOST_PER_MACHINE)]]
    folder: str  # the run folder on it
    local: bool  # True where that is this machine's disk

    @property
    def machine(self) -> Machine:
        """To be reached over ssh."""
        return Machine(self.host, port=self.port)

    def has(self, rank: int) -> bool:
        """True for a rank of this machine."""
        return self.ranks[0] <= rank < sum(self.ranks)


@dataclass
class LogFile:
    """One process's file, read from where the last look ended."""

    rank: int  # whose it is
    path: Path  # the file; it needn't be there yet
    offset: int = 0  # bytes read so far

    def new_lines(self, *, rest: bool = False) -> Iterator[str]:
        """Whole lines since the last look, read as they are taken; with `rest` a last one without its end too."""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset)
                for line in file:
                    if rest or line.endswith(b"\n"):
                        self.offset += len(line)
                        yield from line.decode(errors="replace").splitlines()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path.name} can't be read: {error}", str(self.path), ("remove the file",)) from error


@dataclass
class FarFile:
    """A file on another machine, read through its agent."""

    rank: int  # whose it is
    path: str  # the file there
    link: AgentConnection  # the conversation with the agent
    offset: int = 0  # bytes read so far

    def new_lines(self, *, rest: bool = False) -> Iterator[str]:
        """Whole lines since the last look; with `rest` a last one without its end too."""
        while True:
            answer = self.link.ask(ReadLog(self.path, self.offset, rest), ANSWER_S)
            yield from answer.text.splitlines()
            if self.offset == answer.offset:
                return
            self.offset = answer.offset


def show_logs(
    folder: RunFolder,
    rank: int | None,
    *,
    last: int,
    follow: bool,
    show: Callable[[str], None],
    say: Callable[[str], None],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Shows what the processes wrote, each line with its rank where there are several.

    What lies on other machines is read over ssh.

    Args:
        folder: the run.
        rank: one process alone; None for all.
        last: so many lines of each; 0 for all.
        follow: go on until the run ends.
        show: is given the lines.
        say: is told where nothing can be shown.
        settings: options of the cluster, by dotted key, that the user gives now.

    Raises:
        UserError: there is no such rank.
        RunError: the machine that has its file can't be asked.
    """
    places = read_places(folder)
    _check_rank(folder, places, rank)
    with _far_files(folder, places, rank, say, settings or {}) as far:
        files: dict[int, LogFile | FarFile] = {
            file.rank: file for file in [*log_files(folder), *far] if rank in (None, file.rank)
        }
        for file in files.values():
            lines = file.new_lines(rest=not follow)
            for line in deque(lines, last) if last else lines:
                show(_with_rank(line, file.rank, rank))
        if follow:
            for file, line in _grown(folder, files, rank):
                show(_with_rank(line, file.rank, rank))
    if not files:
        say(f"{folder.ranks} has no logs: under torchrun or --init each process writes to its own terminal")


@contextmanager
def _far_files(
    folder: RunFolder,
    places: Sequence[LogPlace],
    rank: int | None,
    say: Callable[[str], None],
    settings: Mapping[str, Any],
) -> Iterator[list[FarFile]]:
    """The files on other machines, as far as they are asked for; of all, those that can be read."""
    wanted = [place for place in places if not place.local and (rank is None or place.has(rank))]
    if not wanted:
        yield []
        return
    options = _reach(folder, settings, say)
    machines = [place.machine for place in wanted]
    with (
        scratch("logs") as private,
        assembled(machines, options, private, FactsWanted(only=("name",))) as agents,
    ):
        if rank is not None:
            agents.require_all()
        for place in wanted:
            contact = agents.contacts.get(place.machine.name)
            if contact:
                who = f"ranks {place.ranks[0]} to {sum(place.ranks) - 1}"
                say(f"{contact.what}; the logs of {who} are in {place.folder}/ranks there")
        links = {link.machine.name: link for link in agents.links}
        yield [
            FarFile(each, f"{place.folder}/ranks/{each}.log", links[place.machine.name])
            for place in wanted
            for each in range(place.ranks[0], sum(place.ranks))
            if place.machine.name in links and rank in (None, each)
        ]


# Of the cluster's options, those that are executed, here or on the machines that a run folder names.
_EXECUTED = ("ssh", "python", "workdir")


def reach_of(options: ClusterOptions) -> dict[str, str]:
    """How machines are reached and entered, as `remember_reach` keeps it."""
    return {name: str(getattr(options, name)) for name in _EXECUTED}


def _reach(folder: RunFolder, settings: Mapping[str, Any], say: Callable[[str], None]) -> ClusterOptions:
    """How the machines of a run are reached: as the user says, or as this user's own launch did.

    The folder's job.toml is somebody's word and may be anybody's; what it says is told, never executed.
    """
    own = load_job(settings).job.cluster
    given = {key.removeprefix("cluster.") for key in settings}
    kept = {name: value for name, value in (remembered_reach(folder.path) or {}).items() if name not in given}
    own = own.model_copy(update={name: kept[name] for name in _EXECUTED if name in kept})
    said = written_values(folder.job)
    for name in _EXECUTED:
        wanted = said.get(f"cluster.{name}", getattr(own, name))
        if name not in given and wanted != getattr(own, name):
            words = shlex.quote(f"cluster.{name}={wanted}")
            say(f"ignoring cluster.{name} of the run folder; to use this value, add --set {words}")
    return own


def log_files(folder: RunFolder) -> list[LogFile]:
    """The files on this machine, by rank."""
    found = [LogFile(int(path.stem), path) for path in folder.ranks.glob("*.log") if path.stem.isdecimal()]
    return sorted(found, key=lambda file: file.rank)


def read_places(folder: RunFolder) -> list[LogPlace]:
    """Where the machines of the run keep their files; empty where all are in the run folder.

    Raises:
        UserError: the file that says so is damaged.
    """
    path = folder.machines
    try:
        return TypeAdapter(list[LogPlace]).validate_python(parse_json(read_bytes(path)))
    except FileNotFoundError:
        return []
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "content"
        raise UserError(f"{path.name} is damaged: {place}: {first['msg']}", str(path), ("remove the file",)) from error
    except (OSError, ValueError) as error:
        what = f"{path.name} is damaged: {str(error).splitlines()[0]}"
        raise UserError(what, str(path), ("remove the file",)) from error


def _check_rank(folder: RunFolder, places: list[LogPlace], rank: int | None) -> None:
    if rank is None:
        return
    known = [file.rank for file in log_files(folder)]
    if known and rank not in known and not any(place.has(rank) for place in places):
        have = ", ".join(map(str, known))
        raise UserError(f"there is no log of rank {rank}", str(folder.ranks), (f"choose one of the ranks {have}",))


def _grown(
    folder: RunFolder, files: dict[int, LogFile | FarFile], rank: int | None
) -> Iterator[tuple[LogFile | FarFile, str]]:
    """New lines until the run ends; files that appear meanwhile are taken in."""
    head, over = head_of(folder.path), False
    while not over:
        # Asked before the last look, so that nothing written before the end is missed.
        over = not (head and is_running(head))
        for file in log_files(folder):
            if rank in (None, file.rank):
                files.setdefault(file.rank, file)
        for file in files.values():
            for line in file.new_lines(rest=over):
                yield file, line
        if not over:
            time.sleep(POLL_S)


def _with_rank(line: str, rank: int, only: int | None) -> str:
    return line if only is not None else f"rank {rank} | {line}"
