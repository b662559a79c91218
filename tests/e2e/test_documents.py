"""Documents 002 and 003 on one machine: what their readers type in a terminal, or press in VS Code."""

import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.e2e.command import (
    QUICK,
    assert_equal_weights,
    done,
    final_weights,
    finish,
    free_port,
    processes_of,
    read,
    shell,
    start,
    training,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)


def typed(line, **variables):
    """Types a line, and fails with its words unless it ends well."""
    ended = finish(shell(line, **variables))
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.slow
def test_002_going_on_from_a_checkpoint():
    done("train -n 2 digits mlp --epochs 1 --out run", QUICK)
    done("train -n 2 digits mlp --epochs 2 --out more --resume run", QUICK)
    done("resume run --epochs 2 -n 2")
    assert_equal_weights(final_weights("run"), final_weights("more"))


# Document 002: one rank under the debugger, the others without.


class Editor:
    """As much of the debug adapter protocol as VS Code needs to attach and to hold a program at a line."""

    def __init__(self, port):
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._stream = self._connection.makefile("rwb")
        self._sent = 0
        self._waiting = []

    def ask(self, command, **arguments):
        """Sends a request; returns its number."""
        self._sent += 1
        body = json.dumps({"seq": self._sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()
        return self._sent

    def hear(self, wanted):
        """Waits for the first message that a condition is true for; others are kept for later."""
        for message in self._waiting:
            if wanted(message):
                self._waiting.remove(message)
                return message
        while not wanted(message := self._read()):
            self._waiting.append(message)
        return message

    def answer(self, command, **arguments):
        number = self.ask(command, **arguments)
        found = self.hear(lambda message: message.get("request_seq") == number)
        assert found["success"], found
        return found.get("body", {})

    def event(self, name):
        return self.hear(lambda message: message.get("event") == name).get("body", {})

    def close(self):
        self._stream.close()
        self._connection.close()

    def _read(self):
        length = 0
        while line := self._stream.readline().strip():
            length = int(re.fullmatch(rb"Content-Length: (\d+)", line)[1])
        assert length, "the debugger has gone"
        return json.loads(self._stream.read(length))


def is_open(port):
    """Whether somebody listens; without a call, since the debugger takes the first caller for the editor."""
    found = psutil.net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


NET = """from torch import nn


class Net(nn.Sequential):
    def forward(self, pixels):
        seen = len(pixels)
        return super().forward(pixels)


def net():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""
SCRIPT = """import os
rank = os.environ["RANK"]
seen = rank
print("rank", seen)
"""


def held_at(port, file, line, process):
    """Attaches as VS Code does, and waits until the program has come to a line; gives the editor and the frame."""
    wait_until(lambda: is_open(port), process)
    editor = Editor(port)
    editor.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
    attached = editor.ask("attach", justMyCode=False)
    editor.event("initialized")
    editor.answer("setBreakpoints", source={"path": str(file)}, breakpoints=[{"line": line}])
    editor.answer("configurationDone")
    editor.hear(lambda message: message.get("request_seq") == attached)
    stopped = editor.event("stopped")
    (frame, *_) = editor.answer("stackTrace", threadId=stopped["threadId"])["stackFrames"]
    assert (Path(frame["source"]["path"]).name, frame["line"]) == (file.name, line)
    rank = editor.answer("evaluate", expression="__import__('os').environ['RANK']", frameId=frame["id"])
    assert rank["result"] == "'1'"
    return editor


def debugged(line, file, at, holds_s):
    """Runs a command with rank 1 under the debugger, holds that rank for so long, and gives how the command ended."""
    pytest.importorskip("debugpy", reason="would have held rank 1 with debugpy, which is not installed")
    port = free_port()
    with training("train", line, f"--out run -n 2 --debug-rank 1 --cluster.debug-port {port}", by=start) as process:
        editor = held_at(port, Path(file).absolute(), at, process)
        time.sleep(holds_s)
        assert process.poll() is None
        editor.answer("disconnect", terminateDebuggee=False)
        editor.close()
        ended = finish(process)
    assert ended.code == 0, ended.err
    entry = json.loads(ended.err[ended.err.index("{") : ended.err.index("\n}") + 2])
    assert entry["request"] == "attach"
    assert entry["connect"] == {"host": "127.0.0.1", "port": port}
    assert "every user of that machine can run code as you" in ended.err
    return ended


@pytest.mark.slow
def test_002_one_rank_is_held_by_the_debugger_for_longer_than_collectives_wait():
    Path("mine.py").write_text(NET)
    limits = "--cluster.collective-timeout-s 3 --cluster.elastic off --device cpu --epochs 1"
    ended = debugged(f"digits mine.py:net {limits} {' '.join(QUICK)}", "mine.py", 6, holds_s=8)
    assert processes_of("run") == 2
    assert "waiting for rank" not in ended.err


@pytest.mark.slow
def test_002_a_script_of_the_users_is_held_too():
    Path("train.py").write_text(SCRIPT)
    ended = debugged("train.py", "train.py", 4, holds_s=0)
    assert "rank 0" in ended.out + ended.err + Path("run/ranks/0.log").read_text()


@pytest.mark.slow
def test_002_a_port_of_the_debugger_that_is_taken_is_refused():
    pytest.importorskip("debugpy", reason="would have started rank 1 under debugpy, which is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = f"train digits mlp -n 2 --device cpu --debug-rank 1 --cluster.debug-port {port}"
        assert "choose another port: --cluster.debug-port" in done(job, QUICK, code=2).err


# Document 003: a rank table's cards on one machine, started by a loop; ways to be parallel.


def table_of(cards, address="10.0.0.1"):
    devices = [
        {"device_id": str(card), "device_ip": f"192.{1 + card}.27.6", "rank_id": str(rank)}
        for rank, card in enumerate(cards)
    ]
    server = {"server_id": address, "device": devices, "host_nic_ip": "reserve"}
    table = {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}
    return json.dumps(table, indent=2)


RUN = """#!/bin/bash
DATA_PATH=$1
RANK_SIZE=$2
EXEC_PATH=$(pwd)
export RANK_TABLE_FILE=${EXEC_PATH}/rank_table_2pcs.json
export RANK_SIZE
export MASTER_PORT=PORT

for((i=1;i<${RANK_SIZE};i++))
do
    mkdir device$i
    cd ./device$i
    export DEVICE_ID=$i
    export RANK_ID=$i
    manyhands explain --json > explain$i.log
    manyhands train ${DATA_PATH} mlp --epochs 1 --out run > train.log$i 2>&1 &
    cd ../
done

mkdir device0
cd ./device0
export DEVICE_ID=0
export RANK_ID=0
manyhands explain --json > explain0.log
manyhands train ${DATA_PATH} mlp --epochs 1 --out run > train.log0 2>&1
if [ $? -eq 0 ];then
    echo "training success"
else
    echo "training failed"
    exit 2
fi
cd ../
wait
"""


@pytest.mark.slow
def test_003_run_sh_starts_each_card_in_a_folder_of_its_own(here):
    (here / "rank_table_2pcs.json").write_text(table_of((0, 1)))
    (here / "run.sh").write_text(RUN.replace("PORT", str(free_port())))
    assert typed("bash run.sh digits 2").out == "training success\n"
    for rank in (0, 1):
        found = read(f"device{rank}/explain{rank}.log")
        assert [found[key]["value"] for key in ("rank", "local_rank", "world_size")] == [rank, rank, 2]
        assert found["rank"]["from"] == "RANK_ID"
        assert found["master_address"]["value"] == "127.0.0.1"
    assert processes_of("device0/run") == 2
    assert not (here / "device1" / "run").exists()


@pytest.fixture
def cifar(here):
    """CIFAR-10's binary form with random pixels: the names and sizes of its files are the published ones."""
    folder = here / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = random.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n")
    return here / "data"


MODES = {
    "data": "--parallel data",
    "fsdp": "--parallel fsdp",
    "hybrid": "--parallel hybrid",
    "semi": "--parallel semi --pin fc=o@dp --pin loss=o@dp",
    "auto": "--parallel auto --set parallel.measure=false",
}
FEW = "--batch 8 --train.max-steps 2 --train.evaluate-every 0 --data.test-samples 16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "pieces"), [*((mode, False) for mode in MODES), ("semi", True)], ids=lambda word: str(word)
)
def test_003_resnet50_on_cifar10s_binary_files(mode, pieces, cifar, here):
    """Each way to be parallel, saved whole or in pieces, and gone on with in another way on one process."""
    line = f"train -n 2 cifar10 resnet50 {FEW} {MODES[mode]} {'--checkpoint.pieces' * pieces} --out run"
    done(line, MANYHANDS_DATA=str(cifar))
    # For a network like this one the search comes back with data parallel.
    assert read("run/plan.json")["mode"] == ("data" if mode == "auto" else mode)
    assert processes_of("run") == 2
    assert (here / "run" / "checkpoints" / "step-00000002" / "pieces.json").exists() == pieces
    done("resume run -n 1 --set train.max_steps=3 --parallel.mode data", MANYHANDS_DATA=str(cifar))
    assert (here / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("cards", [2, 8])
@pytest.mark.parametrize("mode", ["semi", "hybrid"])
def test_003_each_card_of_a_table_holds_its_part(mode, cards, cifar, here):
    name = f"rank_table_{cards}pcs.json"
    (here / name).write_text(table_of(range(cards), "127.0.0.1"))
    line = f"train cifar10 resnet50 {FEW} --device cpu --rank-table {name} {MODES[mode]} --out run"
    done(line, MANYHANDS_DATA=str(cifar))
    plan = read("run/plan.json")
    assert (plan["mode"], plan["mesh"]) == (mode, {"dp": cards})
    assert processes_of("run") == cards


@pytest.mark.slow
def test_003_pictures_of_224_pixels(cifar):
    few = FEW.replace("--batch 8", "--batch 2 --data.image-size 224")
    done(f"train -n 2 cifar10 resnet50 {few} {MODES['semi']} --out run", MANYHANDS_DATA=str(cifar))
    assert processes_of("run") == 2
