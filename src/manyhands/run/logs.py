"""What the processes of a run wrote: their own files in the run folder, as they are or as they grow."""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from manyhands.cluster.assemble import assembled
from manyhands.cluster.inventory import Machine
from manyhands.cluster.link import Link
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.folder import RunFolder
from manyhands.core.outside import parse_json, read_bytes
from manyhands.core.registry import goes_on, running
from manyhands.report.read import no_run
from manyhands.run.watch import matches, unknown_run

POLL_S = 0.2
ANSWER_S = 20.0
RUNS = Path("runs")


class LogPlace(BaseModel):
    """Where the logs of one machine's processes are.

    Attributes:
        host: the machine.
        ranks: its first rank and how many it has.
        folder: the run folder on it.
        local: True where that is this machine's disk.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    host: str
    ranks: tuple[int, int]
    folder: str
    local: bool

    def has(self, rank: int) -> bool:
        """True for a rank of this machine."""
        return self.ranks[0] <= rank < sum(self.ranks)


@dataclass
class LogFile:
    """One process's file, read from where the last look ended.

    Attributes:
        rank: whose it is.
        path: the file; it needn't be there yet.
        offset: bytes read so far.
    """

    rank: int
    path: Path
    offset: int = 0

    def new_lines(self, *, rest: bool = False) -> list[str]:
        """Whole lines since the last look; with `rest` a last one without its end too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text if rest else text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.decode(errors="replace").splitlines()


@dataclass
class FarFile:
    """A file on another machine, read through its agent.

    Attributes:
        rank: whose it is.
        path: the file there.
        link: the conversation with the agent.
        offset: bytes read so far.
    """

    rank: int
    path: str
    link: Link
    offset: int = 0

    def new_lines(self, *, rest: bool = False) -> list[str]:
        """Whole lines since the last look; with `rest` a last one without its end too."""
        lines: list[str] = []
        while True:
            answer = self.link.ask({"do": "log", "path": self.path, "offset": self.offset, "rest": rest}, ANSWER_S)
            lines += str(answer["text"]).splitlines()
            if self.offset == answer["offset"]:
                return lines
            self.offset = int(answer["offset"])


AnyFile = LogFile | FarFile


def find_run(word: str) -> RunFolder:
    """The run that is meant, whether it goes on or not: a folder, its name, or the beginning of that.

    Raises:
        UserError: there is none, or there are several.
    """
    for folder in (RunFolder(Path(word).expanduser()), RunFolder(RUNS / word)):
        if word and folder.exists():
            return folder
    runs = running()
    found = [Path(record.run) for record in matches(word, runs)]
    found = found or sorted(
        path.parent for path in RUNS.glob("*/job.toml") if word and path.parent.name.startswith(word)
    )
    if len(found) == 1:
        return RunFolder(found[0])
    if found:
        raise UserError(f'"{word}" may mean {len(found)} runs', "RUN", tuple(map(str, found)))
    if "/" in word or Path(word).exists():
        raise no_run(Path(word))
    raise unknown_run(
        word, [record.name for record in runs] + sorted(path.parent.name for path in RUNS.glob("*/job.toml"))
    )


def show_logs(
    folder: RunFolder,
    rank: int | None,
    *,
    last: int,
    follow: bool,
    show: Callable[[str], None],
    say: Callable[[str], None],
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

    Raises:
        UserError: there is no such rank.
        RunError: the machine that has its file can't be asked.
    """
    places = read_places(folder)
    _check_rank(folder, places, rank)
    with _far_files(folder, places, rank, say) as far:
        files: dict[int, LogFile | FarFile] = {
            file.rank: file for file in [*log_files(folder), *far] if rank in (None, file.rank)
        }
        for file in files.values():
            lines = file.new_lines(rest=not follow)
            for line in deque(lines, last or None):
                show(_with_rank(line, file.rank, rank))
        if follow:
            for file, line in _grown(folder, files, rank):
                show(_with_rank(line, file.rank, rank))
    if not files:
        say(f"nothing is kept in {folder.ranks}: under torchrun or --init the output goes where each process began")


@contextmanager
def _far_files(
    folder: RunFolder, places: Sequence[LogPlace], rank: int | None, say: Callable[[str], None]
) -> Iterator[list[FarFile]]:
    """The files on other machines, as far as they are asked for; of all, those that can be read."""
    wanted = [place for place in places if not place.local and (rank is None or place.has(rank))]
    if not wanted:
        yield []
        return
    options = load_job({}, file=folder.job).job.cluster
    machines = [Machine(place.host) for place in wanted]
    with (
        tempfile.TemporaryDirectory(prefix="manyhands-logs-") as scratch,
        assembled(machines, options, Path(scratch), {"only": ["name"]}) as crew,
    ):
        if rank is not None:
            crew.require_all()
        for place in wanted:
            contact = crew.contacts.get(Machine(place.host).name)
            if contact:
                who = f"ranks {place.ranks[0]} to {sum(place.ranks) - 1}"
                say(f"{contact.what}; {who} are in {place.folder}/ranks there")
        links = {link.machine.host: link for link in crew.links}
        yield [
            FarFile(each, f"{place.folder}/ranks/{each}.log", links[place.host])
            for place in wanted
            for each in range(place.ranks[0], sum(place.ranks))
            if place.host in links and rank in (None, each)
        ]


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
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path.name} is damaged: {str(error).splitlines()[0]}", str(path), ("remove it",)) from error


def _check_rank(folder: RunFolder, places: list[LogPlace], rank: int | None) -> None:
    if rank is None:
        return
    known = [file.rank for file in log_files(folder)]
    if known and rank not in known and not any(place.has(rank) for place in places):
        have = ", ".join(map(str, known))
        raise UserError(f"rank {rank} has left no log", str(folder.ranks), (f"these have: {have}",))


def _grown(
    folder: RunFolder, files: dict[int, LogFile | FarFile], rank: int | None
) -> Iterator[tuple[LogFile | FarFile, str]]:
    """New lines until the run ends; files that appear meanwhile are taken in."""
    heads = [record for record in running() if record.run == str(folder.path.resolve())]
    over = False
    while not over:
        # Asked before the last look, so that nothing written before the end is missed.
        over = not any(goes_on(head) for head in heads)
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
