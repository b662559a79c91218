"""What is a script's own: its words behind --, and all that it prints."""

import os
import threading

from manyhands.cli.main import _before_separator, _without_local_rank
from manyhands.cluster.agents.mirror import OUTPUT, RecordReceiver, RecordSender
from manyhands.core.run_folder import RunFolder
from manyhands.run.train import ScriptOutput


def test_words_behind_the_dashes_are_left_alone():
    given = ["train", "--local-rank=1", "train.py", "--", "--local_rank=0", "--json"]
    assert _without_local_rank(given) == ["train", "train.py", "--", "--local_rank=0", "--json"]
    assert "--json" not in _before_separator(given)


def test_output_without_line_ends_comes_from_another_machine_too(tmp_path):
    there, here = RunFolder(tmp_path / "there"), RunFolder(tmp_path / "here")
    for folder in (there, here):
        folder.ranks.mkdir(parents=True)
    receiver = RecordReceiver(here.path)
    sender = RecordSender(there.path, receiver.file_sizes(), output=True)
    log = there.path / OUTPUT
    written = b""
    for piece in (b"epoch 1\n", "\r 10 %|███".encode()[:-1], "█".encode()[-1:] + b"| it/s", b"\nlast words"):
        written += piece
        log.write_bytes(written)
        for news in sender.new_pieces():
            receiver.write_piece(news)
        assert (here.path / OUTPUT).read_bytes() == written


def test_all_that_rank_0_writes_is_shown_where_the_reader_is_slow(tmp_path, monkeypatch):
    log = tmp_path / "0.log"
    echo = ScriptOutput(log)
    log.write_bytes(b"x" * 300_000)
    reader, writer = os.pipe()
    os.set_blocking(reader, True)
    found = bytearray()

    def read():
        while piece := os.read(reader, 1000):
            found.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()

    class Output:
        def flush(self):
            """Nothing waits."""

        def fileno(self):
            return writer

    # A signal that comes meanwhile ends a write early.
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, bytes(content)[:4096]))
    monkeypatch.setattr("sys.stdout", Output())
    echo.show_new()
    os.close(writer)
    thread.join()
    os.close(reader)
    assert len(found) == 300_000


def test_a_script_that_writes_without_a_pause_holds_nothing_up(tmp_path, monkeypatch):
    log = tmp_path / "0.log"
    echo = ScriptOutput(log)
    log.write_bytes(b"x" * 10)
    shown = []

    def write(_descriptor, content):
        assert len(shown) < 5, "it never returns"
        shown.append(bytes(content))
        with log.open("ab") as script:
            script.write(b"y" * 10)

    monkeypatch.setattr("manyhands.core.files.write_all", write)
    echo.show_new()
    echo.show_new()
    assert b"".join(shown) == b"x" * 10 + b"y" * 10
