"""Copies records and small files, but no checkpoints, from the machine of rank 0 to the launcher's run folder."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from manyhands.cluster.agents.folders import replace_job
from manyhands.cluster.agents.protocol import FilePiece
from manyhands.core.files import file_size, read_new_lines, replaced_on_success, unused_path, write_all
from manyhands.core.run_folder import RunFolder

GROWING = ("metrics.jsonl", "events.jsonl")
OUTPUT = "ranks/0.log"  # output of rank 0; all that a user's script shows
JOB = "job.toml"
WHOLE = (JOB, "plan.json", "env.json", "network.json", "evaluations/best.json", "evaluations/last.json",
         "evaluations/test-best.json", "evaluations/test-last.json")  # fmt: skip

PIECE_BYTES = 1 << 20  # larger pieces would delay other messages


class RecordSender:
    """Collects the new records of this machine's run folder, to be sent to a `RecordReceiver`.

    `sent` is the size in bytes of each growing file at the receiver. With `output`, the output of rank 0 is sent too.
    With `partial`, incomplete last lines are sent too.
    """

    def __init__(self, folder: Path, sent: Mapping[str, int], *, output: bool = False, partial: bool = False) -> None:
        self._folder, self._partial = folder, partial
        # If the receiver's file is longer, it has other records (of an earlier failure): send the entire file.
        sizes = {name: file_size(folder / name) for name in ((*GROWING, OUTPUT) if output else GROWING)}
        self._sent = {name: sent.get(name, 0) if sent.get(name, 0) <= size else 0 for name, size in sizes.items()}
        self._seen: dict[str, tuple[int, int]] = {}

    def new_pieces(self) -> Iterator[FilePiece]:
        """Yields changes since the last call: new parts of growing files, and changed small files in full."""
        for name, sent in self._sent.items():
            path = self._folder / name
            offset = sent if sent <= file_size(path) else 0  # truncated or replaced
            # Progress bars write incomplete lines.
            text = read_new_lines(path, offset, PIECE_BYTES, unfinished=self._partial or name == OUTPUT)
            self._sent[name] = offset + len(text)
            if text:
                yield FilePiece(name, text.decode(*_encoding(name)), offset)
        for name in WHOLE:
            path = self._folder / name
            with contextlib.suppress(OSError):
                state = path.stat()
                identity = (state.st_mtime_ns, state.st_size)
                if self._seen.get(name) != identity and state.st_size <= PIECE_BYTES * 16:
                    self._seen[name] = identity
                    yield FilePiece(name, path.read_text(encoding="utf-8", errors="replace"))


class RecordReceiver:
    """Writes received records into a run folder; keeps records in memory while the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: deque[FilePiece] = deque()

    def file_sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each growing file; 0 for a missing file."""
        return {name: file_size(self._folder / name) for name in (*GROWING, OUTPUT)}

    def write_piece(self, piece: FilePiece) -> None:
        """Writes a piece. A piece with offset 0 starts a new file; an existing growing file is renamed first."""
        self._waiting.append(piece)
        with contextlib.suppress(OSError):
            while self._waiting:
                self._write_to_disk(self._waiting[0])
                self._waiting.popleft()

    def _write_to_disk(self, piece: FilePiece) -> None:
        name = piece.name
        text, path = piece.text.encode(*_encoding(name)), self._folder / name
        if name in {*GROWING, OUTPUT}:
            self._append_to_file(path, piece.offset, text)
        elif name == JOB:
            replace_job(RunFolder(self._folder), piece.text)
        elif name in WHOLE:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_on_success(path) as part:
                part.write_bytes(text)

    def _append_to_file(self, path: Path, offset: int, text: bytes) -> None:
        size = file_size(path)
        if size and offset == 0:
            path.rename(unused_path(path.parent, path.stem, path.suffix))
        elif size != offset:
            raise ValueError(f"{path} has {size} bytes, but the received piece starts at byte {offset}")
        try:
            with path.open("ab", buffering=0) as file:
                write_all(file.fileno(), text)
        except OSError:
            os.truncate(path, offset)  # the next attempt writes the entire piece
            raise


def _encoding(name: str) -> tuple[str, str]:
    """Returns (encoding, error handler) of a file. The output of a user's program may have any encoding."""
    return ("latin-1", "strict") if name == OUTPUT else ("utf-8", "replace")
