"""Every reader of files from outside turns damaged content into a plain result or one short error of ours."""

import functools
import json
import re
import shutil
import signal
import socket

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from manyhands.checkpoint.describe import open_description
from manyhands.checkpoint.folders import find_checkpoint, newest_checkpoint, read_state
from manyhands.checkpoint.foreign import name_optimizer, read_foreign
from manyhands.checkpoint.read import load_checkpoint, open_checkpoint
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.trained import find_record
from manyhands.checkpoint.write import save_unsharded
from manyhands.cluster.agents.protocol import FilePiece, WorkersEnded, WorkersStarted
from manyhands.cluster.hosts.this_process import decide_launch
from manyhands.cluster.messages import Alive, Call, CallResult, decode, encode
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError
from manyhands.core.mesh import Mesh, TensorLayout
from manyhands.core.records import write_json
from manyhands.core.run_folder import RunFolder
from manyhands.data.decode import read_content, read_header
from manyhands.data.folder import list_pack, list_splits, pack_path
from manyhands.data.packing import PackRequest, make_pack, read_contents
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.split.strategy import resolve_letters as resolve_plan
from manyhands.parallel.split.tracing import describe_network
from manyhands.report.page import render_page
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines
from manyhands.run.logs import read_log_locations
from tests.report.fake_run import FakeRun

READERS = {}
SECONDS = 30  # for one file; a machine may be busy
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def reader(write):
    """Registers a function that reads a folder, with the one that writes the sound files into it."""
    return lambda read: READERS.setdefault(read.__name__.removeprefix("read_"), (write, read))[1]


def text(name, content):
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


@reader(text("job.toml", 'data = "pets"\n[train]\nlr = 0.1\nepochs = 3\n[cluster]\nhosts = ["n1:2", "n2"]\n'))
def read_job(folder):
    load_job({}, file=folder / "job.toml", environment={})


@reader(text("hostfile", "n1 slots=4 max_slots=8\nuser@n2 slots=4 # more\n10.0.0.3\n[fd00::1]:2\n"))
def read_hostfile(folder):
    decide_launch(ClusterOptions(hostfile=str(folder / "hostfile")), {})


def device(server, card):
    return {"device_id": str(card), "device_ip": f"192.100.{server}.{card}", "rank_id": str(2 * server + card)}


SERVERS = [{"server_id": "127.0.0.1", "device": [device(0, 0), device(0, 1)]}]
TABLE = {"version": "1.0", "server_count": "1", "status": "completed", "server_list": SERVERS}


@reader(text("ranks.json", json.dumps(TABLE)))
def read_rank_table(folder):
    decide_launch(ClusterOptions(rank_table=str(folder / "ranks.json"), join_timeout_s=1), {})


ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 2
num_processes: 4
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
"""


@reader(text("accelerate.yaml", ACCELERATE))
def read_accelerate(folder):
    decide_launch(ClusterOptions(file=str(folder / "accelerate.yaml")), {})


SLURM = {"STEP_ID": "0", "JOB_ID": "1", "PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "4", "NODEID": "0"}
SLURM |= {"STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "n[1-2]"}


@reader(text("environment", "\n".join(f"SLURM_{name}={value}" for name, value in SLURM.items())))
def read_launchers_variables(folder):
    lines = (folder / "environment").read_bytes().decode(errors="surrogateescape").replace("\0", "").splitlines()
    decide_launch(ClusterOptions(), dict(line.split("=", 1) for line in lines if "=" in line))


@functools.cache
def graph():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return describe_network(network.train(), torch.zeros(1, 4, 4))


def write_plan(folder):
    layout = TensorLayout((8, 16), (8, 16), ((0, (1,)),))
    placements = {"1": "n@dp o@tp", "3": "n@dp"}
    plan = Plan(Mesh((("dp", 2), ("tp", 2))), placements, "n@dp", ("1",), {"1.weight": layout}, {"mode": "semi"})
    (folder / "plan.json").write_text(json.dumps(plan.as_plain()))


@reader(write_plan)
def read_plans(folder):
    plan = read_plan(folder / "plan.json")
    resolve_plan(plan, graph(), "plan.json")
    json.dumps(plan.as_plain())


WEIGHTS = {"fc.weight": torch.ones(4, 6), "fc.bias": torch.zeros(4)}


def write_checkpoint(folder):
    groups = [{"params": ["fc.weight", "fc.bias"], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}]
    optimizer = {"state": {"fc.bias": {"momentum": torch.ones(4), "step": 3.0}}, "param_groups": groups}
    state = {"step": 5, "epoch": 1, "best": {"step": 5, "top1": 0.5}, "classes": ["a", "b"]}
    save_unsharded(folder / "checkpoints", 5, Snapshot(WEIGHTS, optimizer, state))


@reader(write_checkpoint)
def read_checkpoints(folder):
    last, _ = newest_checkpoint(folder / "checkpoints")
    if last is not None:
        read_state(last)
        find_record(last, load_checkpoint(last).state)
    best = find_checkpoint(folder, "best")
    open_description(best).as_plain()
    open_checkpoint(best).snapshot()


def write_pth(folder):
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(4, 6)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    weights = {f"module.{name}": value for name, value in WEIGHTS.items()}
    content = {"epoch": 3, "arch": "resnet18", "state_dict": weights, "best_acc1": 50.0, "optimizer": optimizer}
    torch.save(content, folder / "a.pth.tar")


@reader(write_pth)
def read_torch_files(folder):
    snapshot = read_foreign(folder / "a.pth.tar")
    if snapshot.optimizer is not None:
        name_optimizer(snapshot.optimizer, list(WEIGHTS))


@reader(lambda folder: save_file(WEIGHTS, folder / "net.safetensors"))
def read_safetensors(folder):
    read_foreign(folder / "net.safetensors")
    open_description(folder / "net.safetensors").as_plain()


def write_pictures(folder):
    for number, name in enumerate(("cat.png", "dog.jpg", "owl.tif")):
        Image.effect_noise((9, 7), 50 + number).save(folder / name)


@reader(write_pictures)
def read_pictures(folder):
    for path in folder.iterdir():
        read_header(str(path), read_content(str(path)))


def write_pack(folder):
    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (9, 7)).save(folder / "pets" / name / "a.png")
    request = PackRequest(folder / "pets", pack_path(folder / "pets"))
    make_pack(read_contents(folder / "pets"), request, processes=1, replace=False, progress=lambda *_: None)


@reader(write_pack)
def read_packs(folder):
    list_splits(folder / "pets")
    list_pack(pack_path(folder / "pets"))


def write_run(folder):
    """A run of two updates with a failure."""
    FakeRun(folder, epochs=1, steps_per_epoch=2, record_every=1, classes=["a", "b"]).begin().train().fail()
    write_json(folder / "machines.json", [{"host": "n1", "ranks": [0, 2], "folder": "/x", "local": True}])


@reader(write_run)
def read_run_folders(folder):
    run = read_run(folder)
    render_page(run, {})
    result_lines(run)
    read_log_locations(RunFolder(folder))


MESSAGES = (
    Alive(),
    WorkersStarted(0, [7]),
    FilePiece("metrics.jsonl", "x\n"),
    CallResult(("x", 3)),
    Call("read_log", {"path": "0.log", "offset": 0, "rest": True}),
    WorkersEnded({0: {"status": "finished"}}, {1: 3}, {1: "x"}, ended_by="itself"),
)


@reader(lambda folder: (folder / "messages").write_bytes(b"".join(encode(m, 1) for m in MESSAGES)))
def read_messages(folder):
    for line in (folder / "messages").read_bytes().splitlines():
        decode(line)


# Spaces: a reader of YAML looks for a key behind all brackets of 1,024 bytes.
INSERTED = (b"[    " * 1_500, b'{"a":' * 1_500, b"9" * 5_000, b"1e999", b"NaN", b"-1", b"null", b'"x"', b"{}", b"\x00")
INSERTED += (b"\xff" * 64, b"\n", b'"', b"\\ud800", b"\x1b[31m", b"\xe2\x80\xae", b"../../../etc/passwd", b"", b"\xef")
TOKEN = re.compile(rb'"[^"]*"|-?\d+(\.\d+)?|\w+')


@st.composite
def damage(draw):
    """A function that changes bytes in one place: replaces a token, overwrites, removes, doubles, or truncates."""
    kind, at = draw(st.sampled_from(("token", "over", "remove", "double", "truncate"))), draw(st.floats(0, 1))
    piece = draw(st.sampled_from(INSERTED) | st.binary(max_size=8))

    def change(content):
        tokens = list(TOKEN.finditer(content[:100_000]))
        if kind == "token" and tokens:
            found = tokens[int(at * (len(tokens) - 1))]
            return content[: found.start()] + piece + content[found.end() :]
        start = int(at * len(content))
        end = start + max(1, len(piece))
        if kind == "truncate":
            return content[:start]
        return content[:start] + {"remove": b"", "double": content[start:end] * 3}.get(kind, piece) + content[end:]

    return change


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch):
    """Names aren't looked up: a name server may take seconds to say that there is none, or not answer at all."""
    look_up = socket.getaddrinfo
    by_number = {"flags": socket.AI_NUMERICHOST}
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: look_up(*given, **options | by_number))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder of sound files for each reader, written and read once."""
    root = tmp_path_factory.mktemp("sound")
    for name, (write, read) in READERS.items():
        (root / name).mkdir()
        write(root / name)
        read(root / name)
    return root


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 100), changes=st.lists(damage(), min_size=1, max_size=2))
def test_damaged_files_are_read_or_refused_in_one_screen(name, sound, tmp_path, which, changes):
    shutil.rmtree(tmp_path / "case", ignore_errors=True)
    shutil.copytree(sound / name, tmp_path / "case")
    files = sorted(path for path in (tmp_path / "case").rglob("*") if path.is_file())
    file = files[which % len(files)]
    file.write_bytes(functools.reduce(lambda content, change: change(content), changes, file.read_bytes()))
    signal.alarm(SECONDS)  # its default action ends the test process: a reader that hangs isn't overlooked
    message = ""
    try:
        READERS[name][1](tmp_path / "case")
    except ManyhandsError as error:
        message = str(error)
    finally:
        signal.alarm(0)
    assert message.count("\n") < 40
    assert not UNPRINTABLE.search(message)
