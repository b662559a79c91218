"""What readers of the torch.distributed notes and of MindSpore's tutorial type in a terminal, or press in VS Code."""

import json
import re
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_rank_table import TABLES as RANK_TABLES
from tests.data.test_formats import cifar10_bin
from tests.e2e.command import QUICKLY, done, finish, free_port, processes_of, read, start, training, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# The torch.distributed notes: one rank under the debugger, the others without.


class Editor:
    """As much of the debug adapter protocol as VS Code needs to attach and to hold a program at a line."""

    def __init__(self, port):
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            self.stream = connection.makefile("rwb")
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
        while not (found := [one for one in self._waiting if wanted == {name: one.get(name) for name in wanted}]):
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


def test_notes_one_rank_is_held_by_the_debugger_for_longer_than_collectives_wait():
    """VS Code attaches to rank 1 and holds it at a line of its network for 8 s."""
    pytest.importorskip("debugpy", reason="would have held rank 1 with debugpy, which is not installed")
    Path("mine.py").write_text(NET)
    port = free_port()
    limits = "--cluster.collective-timeout-s 3 --cluster.elastic off --device cpu --epochs 1 --out run -n 2"
    job = f"train digits mine.py:net {limits} {QUICKLY} --debug-rank 1 --cluster.debug-port {port}"
    with training(job, by=start) as process:
        # Without a connection, because the debugger takes the first one for the editor's.
        wait_until(
            lambda: ("LISTEN", port) in ((one.status, one.laddr.port) for one in psutil.net_connections("tcp")), process
        )
        editor = Editor(port)
        editor.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
        attached = editor.ask("attach", justMyCode=False)
        editor.hear(event="initialized")
        editor.answer("setBreakpoints", source={"path": str(Path("mine.py").absolute())}, breakpoints=[{"line": 5}])
        editor.answer("configurationDone")
        editor.hear(**attached)
        (frame, *_) = editor.answer("stackTrace", threadId=editor.hear(event="stopped")["threadId"])["stackFrames"]
        assert (Path(frame["source"]["path"]).name, frame["line"]) == ("mine.py", 5)
        rank = editor.answer("evaluate", expression="__import__('os').environ['RANK']", frameId=frame["id"])
        assert rank["result"] == "'1'"
        time.sleep(8)
        assert process.poll() is None
        editor.answer("disconnect", terminateDebuggee=False)
        editor.stream.close()
        ended = finish(process, code=0, says="every user of that machine can run code as you")
    entry = json.loads(ended.err[ended.err.index("{") : ended.err.index("\n}") + 2])
    assert (entry["request"], entry["connect"]) == ("attach", {"host": "127.0.0.1", "port": port})
    assert processes_of("run") == 2
    assert "waiting for rank" not in ended.err


@pytest.mark.parametrize("job", ["digits mlp", "mine.py"])
def test_notes_a_port_of_the_debugger_that_is_taken_is_refused(job):
    pytest.importorskip("debugpy", reason="would have started rank 1 under debugpy, which is not installed")
    Path("mine.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = f"-n 2 --debug-rank 1 --cluster.debug-port {taken.getsockname()[1]}"
        done("train", job, options, code=2, says="choose another port: --cluster.debug-port")


# MindSpore's distributed training tutorial: a rank table's cards on one machine; ways to be parallel.


def test_mindspore_resnet50_on_cifar10s_binary_files(here):
    """Saved in pieces, and resumed in another way on one process."""
    cifar10_bin(here / "data" / "cifar-10-batches-bin")
    data, semi = str(here / "data"), "--parallel semi --pin fc=o@dp --pin loss=o@dp --checkpoint.pieces"
    job = "train cifar10 resnet50 --train.max-steps 2 --train.evaluate-every 0 --out run -n 2 --batch 8"
    done(job, semi, MANYHANDS_DATA=data)
    assert read("run/plan.json")["mode"] == "semi"
    assert processes_of("run") == 2
    assert (here / "run" / "checkpoints" / "step-00000002" / "pieces.json").exists()
    done("resume run -n 1 --set train.max_steps=3 --parallel.mode data", MANYHANDS_DATA=data)
    assert (here / "run" / "checkpoints" / "step-00000003").is_dir()


def test_mindspore_each_card_of_a_rank_table_holds_its_shard(here):
    (here / "table.json").write_text((RANK_TABLES / "right_8.json").read_text().replace("10.0.0.1", "127.0.0.1"))
    job = "train digits mlp --train.max-steps 2 --batch 8 --train.drop-last --out run"
    done(job, "--device cpu --rank-table table.json --parallel semi --pin 1=o@dp --pin loss=o@dp", QUICKLY)
    plan = read("run/plan.json")
    assert (plan["mode"], plan["mesh"]) == ("semi", {"dp": 8})
    assert [plan["layouts"][name]["cuts"] for name in ("1.weight", "1.bias")] == [[[0, [0]]]] * 2
    assert processes_of("run") == 8
