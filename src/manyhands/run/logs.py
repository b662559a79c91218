"""Shows the output of a run's processes from their log files, on this machine and on others."""

import shlex
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from manyhands.cluster.agents import agent, connection
from manyhands.cluster.agents.machines import started_agents
from manyhands.cluster.doctor.findings import FactsWanted
from manyhands.cluster.hosts.inventory import Machine
from manyhands.cluster.messages import call
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job, written_values
from manyhands.core import files, timeouts
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.scratch import scratch
from manyhands.core.terminal import say, show
from manyhands.run.registry import find_launcher, is_running, saved_ssh_options

POLL_S = 0.2
MOST_RANKS, MOST_PER_MACHINE = 1_000_000, 4096  # limits against a damaged machines.json: each rank's file is read


class LogLocation(BaseModel):
    """The location of the log files of one machine's processes."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    host: str  # the machine
    port: int = Field(default=0, ge=0, le=65535)  # of its ssh server; 0 for ssh's default
    # (first rank, number of ranks)
    ranks: tuple[Annotated[int, Field(ge=0, le=MOST_RANKS)], Annotated[int, Field(ge=0, le=MOST_PER_MACHINE)]]
    folder: str  # path of the run folder there
    local: bool  # True if a disk of this machine has the folder

    @property
    def machine(self) -> Machine:
        return Machine(self.host, port=self.port)

    def has_rank(self, rank: int) -> bool:
        return self.ranks[0] <= rank < sum(self.ranks)


@dataclass
class Log:
    """Reads the log file of one process, on this machine or through the agent of another machine."""

    path: str  # of the file, which may not exist yet
    link: connection.AgentConnection | None = None  # to the agent of its machine; None for this machine
    offset: int = 0  # bytes read so far

    def new_lines(self, *, partial: bool = False) -> Iterator[str]:
        """Yields the complete lines written since the last call. `partial` includes an incomplete last line."""
        while self.link:
            request = call(agent.Agent.read_log, self.path, self.offset, partial)
            text, offset = self.link.ask(request, timeouts.READ_LOG_S)
            yield from text.splitlines()
            if self.offset == offset:
                return
            self.offset = offset
        try:
            with files.open_file(Path(self.path)) as file:
                file.seek(self.offset)
                for line in file:
                    if partial or line.endswith(b"\n"):
                        self.offset += len(line)
                        yield from line.decode(errors="replace").splitlines()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            what = f"{Path(self.path).name} can't be read: {error}"
            raise UserError(what, self.path, ("remove the file",)) from error


def show_logs(folder: RunFolder, rank: int | None, *, last: int, follow: bool, settings: Mapping[str, Any]) -> None:
    """Prints the output of one rank, or of all ranks (`rank` None) with a prefix such as "rank 1 | ".

    Reads other machines' logs over ssh. `last`: number of lines per log, 0 for all. `follow`: print new lines until the
    run ends. `settings`: cluster options by dotted key. Raises UserError for an unknown rank, RunError if ssh failed.
    """
    places, known = read_log_locations(folder), _local_logs(folder)
    if rank is not None and known and rank not in known and not any(place.has_rank(rank) for place in places):
        hints = (f"choose one of the ranks {', '.join(map(str, sorted(known)))}",)
        raise UserError(f"there is no log of rank {rank}", str(folder.ranks), hints)
    prefix, head = "" if rank is not None else "rank {} | ", find_launcher(folder.path) if follow else None
    remote = [place for place in places if not place.local and (rank is None or place.has_rank(rank))]
    with ExitStack() as stack:
        logs = dict[int, Log]()
        if remote:
            logs = stack.enter_context(_remote_logs(remote, rank, _ssh_options(folder, settings)))
        over = False
        while not over:
            over = not (head and is_running(head))  # before the files are read, to miss nothing
            for each, log in _local_logs(folder).items():
                if rank in (None, each):
                    logs.setdefault(each, log)
            for each, log in sorted(logs.items()):
                lines = log.new_lines(partial=over)
                for line in deque(lines, last) if last else lines:
                    show(prefix.format(each) + line)
            last = 0
            if not over:
                time.sleep(POLL_S)
    if not logs:
        say(f"{folder.ranks} has no logs: under torchrun or --init each process writes to its own terminal")


@contextmanager
def _remote_logs(places: Sequence[LogLocation], rank: int | None, options: ClusterOptions) -> Iterator[dict[int, Log]]:
    """Context manager that connects to machines over ssh, and yields {rank: log} for the machines that answer."""
    machines, wanted = [place.machine for place in places], FactsWanted(only=("name",))
    with scratch("logs") as private, started_agents(machines, options, private, wanted) as agents:
        if rank is not None:
            agents.require_all()
        found = dict[int, Log]()
        for place, machine in zip(places, agents.all, strict=True):
            ranks, where = range(place.ranks[0], sum(place.ranks)), f"{place.folder}/ranks"
            if machine.problem:
                shown = f"the logs of ranks {ranks.start} to {ranks.stop - 1} are in {where} there"
                say(f"{machine.problem.message}; {shown}")
            else:
                found |= {each: Log(f"{where}/{each}.log", machine.agent) for each in ranks if rank in (None, each)}
        yield found


EXECUTED = ("ssh", "python", "workdir")  # executed here or on the run's machines


def _ssh_options(folder: RunFolder, settings: Mapping[str, Any]) -> ClusterOptions:
    """Returns the ssh options in `settings`, by default those of the launch. Prints which other ones are ignored."""
    own = load_job(settings).job.cluster
    given = {key.removeprefix("cluster.") for key in settings}
    remembered = saved_ssh_options(folder.path) or {}
    own = own.model_copy(update={name: remembered[name] for name in EXECUTED if name in remembered.keys() - given})
    written = written_values(folder.job)
    for name in EXECUTED:
        wanted = written.get(f"cluster.{name}", getattr(own, name))
        if name not in given and wanted != getattr(own, name):
            words = shlex.quote(f"cluster.{name}={wanted}")
            say(f"ignoring cluster.{name} of the run folder; to use this value, add --set {words}")
    return own


def _local_logs(folder: RunFolder) -> dict[int, Log]:
    return {int(path.stem): Log(str(path)) for path in folder.ranks.glob("*.log") if path.stem.isdecimal()}


def read_log_locations(folder: RunFolder) -> list[LogLocation]:
    """Reads each machine's log location from machines.json; [] if it is missing. Raises UserError if damaged."""
    path = folder.machines
    try:
        return TypeAdapter(list[LogLocation]).validate_python(files.parse_json(files.read_bytes(path)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0]
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
        raise UserError(f"{path.name} is damaged: {what}", str(path), ("remove the file",)) from error
