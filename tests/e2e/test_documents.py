"""What readers of the torch.distributed notes and of MindSpore's tutorial type in a terminal, or press in VS Code."""

import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.e2e.command import QUICKLY, done, finish, free_port, processes_of, read, start, training, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# The torch.distributed notes: one rank under the debugger, the others without.


class Editor:
    """As much of the debug adapter protocol as VS Code needs to attach and to hold a program at a line."""

    def __init__(self, port):
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            self.stream = connection.makefile("rwb")  # keeps the connection open
        self._sent, self._waiting = 0, []

    def ask(self, command, **arguments):
        """Sends a request; returns what its answer is recognized by."""
        self._sent += 1
        body = json.dumps({"seq": self._sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self.stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.stream.flush()
        return {"request_seq": self._sent}

    def hear(self, **wanted):
        """Waits for the first message that has these values; others are kept for later."""
        while not (found := [one for one in self._waiting if wanted.items() <= one.items()]):
            length = int(re.fullmatch(rb"Content-Length: (\d+)\s*", self.stream.readline())[1])
            self.stream.readline()
            self._waiting.append(json.loads(self.stream.read(length)))
        self._waiting.remove(found[0])
        assert found[0].get("success", True), found[0]
        return found[0].get("body", {})

    def answer(self, command, **arguments):
        return self.hear(**self.ask(command, **arguments))


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


def debugged(line, file, at, holds_s):
    """Attaches to rank 1 as VS Code does, holds it at a line of a file for so long; gives how the command ended."""
    pytest.importorskip("debugpy", reason="would have held rank 1 with debugpy, which is not installed")
    port = free_port()
    with training("train", line, f"--out run -n 2 --debug-rank 1 --cluster.debug-port {port}", by=start) as process:
        # Without a call, since the debugger takes the first caller for the editor.
        opened = lambda: any((one.status, one.laddr.port) == ("LISTEN", port) for one in psutil.net_connections("tcp"))  # noqa: E731
        wait_until(opened, process)
        editor = Editor(port)
        editor.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
        attached = editor.ask("attach", justMyCode=False)
        editor.hear(event="initialized")
        editor.answer("setBreakpoints", source={"path": str(Path(file).absolute())}, breakpoints=[{"line": at}])
        editor.answer("configurationDone")
        editor.hear(**attached)
        (frame, *_) = editor.answer("stackTrace", threadId=editor.hear(event="stopped")["threadId"])["stackFrames"]
        assert (Path(frame["source"]["path"]).name, frame["line"]) == (file, at)
        rank = editor.answer("evaluate", expression="__import__('os').environ['RANK']", frameId=frame["id"])
        assert rank["result"] == "'1'"
        time.sleep(holds_s)
        assert process.poll() is None
        editor.answer("disconnect", terminateDebuggee=False)
        editor.stream.close()
        ended = finish(process, code=0)
    entry = json.loads(ended.err[ended.err.index("{") : ended.err.index("\n}") + 2])
    assert (entry["request"], entry["connect"]) == ("attach", {"host": "127.0.0.1", "port": port})
    assert "every user of that machine can run code as you" in ended.err
    return ended


def test_notes_one_rank_is_held_by_the_debugger_for_longer_than_collectives_wait():
    Path("mine.py").write_text(NET)
    limits = "--cluster.collective-timeout-s 3 --cluster.elastic off --device cpu --epochs 1"
    ended = debugged(f"digits mine.py:net {limits} {QUICKLY}", "mine.py", 5, holds_s=8)
    assert processes_of("run") == 2
    assert "waiting for rank" not in ended.err


def test_notes_a_script_of_the_users_is_held_too():
    Path("train.py").write_text(SCRIPT)
    ended = debugged("train.py", "train.py", 4, holds_s=0)
    assert "rank 0" in ended.out + ended.err + Path("run/ranks/0.log").read_text()


def test_notes_a_port_of_the_debugger_that_is_taken_is_refused():
    pytest.importorskip("debugpy", reason="would have started rank 1 under debugpy, which is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = f"train digits mlp -n 2 --device cpu --debug-rank 1 --cluster.debug-port {port}"
        done(job, QUICKLY, code=2, says="choose another port: --cluster.debug-port")


# MindSpore's distributed training tutorial: a rank table's cards on one machine; ways to be parallel.


def table_of(addresses, cards, **port):
    """A rank table as the tutorial prints it; cards of newer machines have a port of their own."""
    servers = []
    for at, address in enumerate(addresses):
        devices = [
            {"device_id": str(card), "device_ip": f"192.{1 + card}.27.{6 + at}", "rank_id": str(at * cards + card)}
            for card in range(cards)
        ]
        servers.append({"server_id": address, "device": [{**one, **port} for one in devices], "host_nic_ip": "reserve"})
    table = {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": "completed"}
    return json.dumps(table, indent=2)


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
    return {"MANYHANDS_DATA": str(here / "data")}


RESNET = "train cifar10 resnet50 --train.max-steps 2 --train.evaluate-every 0 --data.test-samples 16 --out run"


def test_mindspore_resnet50_on_cifar10s_binary_files(cifar, here):
    """Saved in pieces, and resumed in another way on one process."""
    semi = "--parallel semi --pin fc=o@dp --pin loss=o@dp --checkpoint.pieces"
    done(RESNET, "-n 2 --batch 8", semi, **cifar)
    assert read("run/plan.json")["mode"] == "semi"
    assert processes_of("run") == 2
    assert (here / "run" / "checkpoints" / "step-00000002" / "pieces.json").exists()
    done("resume run -n 1 --set train.max_steps=3 --parallel.mode data", **cifar)
    assert (here / "run" / "checkpoints" / "step-00000003").is_dir()


def test_mindspore_each_card_of_a_rank_table_holds_its_shard(here):
    (here / "table.json").write_text(table_of(["127.0.0.1"], 8))
    job = "train digits mlp --train.max-steps 2 --batch 8 --train.drop-last --out run"
    done(job, "--device cpu --rank-table table.json --parallel semi --pin 1=o@dp --pin loss=o@dp", QUICKLY)
    plan = read("run/plan.json")
    assert (plan["mode"], plan["mesh"]) == ("semi", {"dp": 8})
    assert [plan["layouts"][name]["cuts"] for name in ("1.weight", "1.bias")] == [[[0, [0]]]] * 2
    assert processes_of("run") == 8
