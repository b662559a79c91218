"""Sound files of every kind that is read from outside, and the function that reads each."""

import functools
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from bench import fuzz_data as data
from bench.fuzz_mutations import spoil_tree
from bench.fuzz_readers import Reader
from bench.fuzz_runs import read_report, read_small_files, write_run
from bench.fuzz_texts import AGENT, ANY, CLUSTERS, FLAGS, JOB, PLACES, STORE
from bench.fuzz_words import read_words, write_words
from manyhands.checkpoint import commit, layout
from manyhands.checkpoint.described import open_description
from manyhands.checkpoint.find import newest, read_state, resolve
from manyhands.checkpoint.foreign import name_optimizer, read_foreign
from manyhands.checkpoint.load import load
from manyhands.checkpoint.pieces import NetworkLayout
from manyhands.checkpoint.reshard import read_cut
from manyhands.checkpoint.save import held_contents, save
from manyhands.checkpoint.snapshot import Snapshot
from manyhands.checkpoint.source import open_checkpoint
from manyhands.checkpoint.write import finish_pieces, write_pieces
from manyhands.cluster.agents.connection import AgentConnection
from manyhands.cluster.agents.ending import first_cause
from manyhands.cluster.agents.orders import Orders
from manyhands.cluster.agents.protocol import Hello
from manyhands.cluster.agents.supervise import Watch, supervise
from manyhands.cluster.hosts.inventory import Machine, Meeting
from manyhands.cluster.hosts.machines import machines_of
from manyhands.cluster.hosts.recognise import read_cluster
from manyhands.cluster.messages import encode
from manyhands.cluster.rendezvous import participate
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job, parse_value
from manyhands.core.errors import UserError
from manyhands.core.layouts import TensorLayout
from manyhands.core.mesh import Mesh
from manyhands.core.outside import UnreadableError
from manyhands.core.trained import find_record
from manyhands.parallel import said
from manyhands.parallel.plan import Plan, read_plan
from manyhands.parallel.plan import resolve as letters_of
from manyhands.parallel.tracing import describe_network
from manyhands.planner.op_times import OpTime, OpTimes
from manyhands.train.pth_tar import check_same_training
from manyhands.worker.checkpoints import describe_file

torch.set_num_threads(1)


def _text(name: str, content: str) -> Any:
    def write(folder: Path, _rng: random.Random) -> None:
        (folder / name).write_text(content, encoding="utf-8")

    return write


def _bytes(path: Path) -> bytes:
    """Words that come by another way than a file, which has been replaced by something else, or by its place."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def _read_job(folder: Path) -> None:
    load_job({}, file=folder / "job.toml", environment={})


def _read_flags(folder: Path) -> None:
    """Words behind --set, as they are typed."""
    flags: dict[str, Any] = {}
    for line in _bytes(folder / "flags.txt").decode(errors="surrogateescape").splitlines()[:20]:
        key, _, value = line.partition("=")
        flags[key] = parse_value(value)
    load_job(flags, environment={})


def _read_hostfile(folder: Path) -> None:
    machines_of(ClusterOptions(hostfile=str(folder / "hostfile")))


def _read_machines(name: str, folder: Path) -> None:
    read_cluster(folder / name)
    options = {"rank_table": str(folder / name)} if name == "ranks.json" else {"file": str(folder / name)}
    participate(ClusterOptions(**options), {})


def _write_place(folder: Path, rng: random.Random) -> None:
    (folder / "place.json").write_text(json.dumps(PLACES[rng.choice(list(PLACES))]))
    (folder / "ranks.json").write_text(CLUSTERS["ranks.json"])


def _read_place(folder: Path) -> None:
    """The variables of a launcher."""
    try:
        found = json.loads(_bytes(folder / "place.json"))
    except (ValueError, RecursionError):  # Python's own reader, of this bench
        return
    found = found if isinstance(found, dict) else {}
    found = {key: str(value).replace("\0", "") for key, value in found.items() if "=" not in key and "\0" not in key}
    if "RANK_TABLE_FILE" in found:
        found["RANK_TABLE_FILE"] = str(folder / "ranks.json")
    participate(ClusterOptions(), found)


@functools.cache
def _graph() -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    return describe_network(network.train(), torch.zeros(1, 4, 4))


MESH = Mesh((("dp", 2), ("tp", 2)))


def _write_plan(folder: Path, _rng: random.Random) -> None:
    lies = TensorLayout((8, 16), (8, 16), ((0, (1,)),))
    plan = Plan(
        MESH, {"1": "n@dp o@tp", "3": "n@dp"}, "n@dp", ("1",), {"1.weight": lies}, {"reason": "x", "mode": "semi"}
    )
    (folder / "plan.json").write_text(json.dumps(plan.as_plain()))


def _read_plan(folder: Path) -> None:
    plan = read_plan(folder / "plan.json")
    letters_of(plan, _graph(), "plan.json")
    json.dumps(plan.as_plain())


def _snapshot(rng: random.Random) -> Snapshot:
    weights = {"fc.weight": torch.ones(4, 6), "fc.bias": torch.zeros(4), "count": torch.tensor(rng.randrange(9))}
    state = {"fc.weight": {"momentum": torch.ones(4, 6), "step": 3.0}, "fc.bias": {"momentum": torch.ones(4)}}
    groups = [{"params": ["fc.weight", "fc.bias"], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}]
    pictures = {"size": 4, "resize": 4, "channels": 1, "mean": [0.5], "std": [0.5]}
    trained = {"v": 1, "name": "mlp", "num_classes": 2, "pictures": pictures, "classes": ["a", "b"]}
    best = {"step": 5, "top1": 0.5}
    return Snapshot(
        weights,
        {"state": state, "param_groups": groups},
        {"step": 5, "epoch": 1, "best": best, "classes": ["a", "b"], "trained": trained},
    )


def _write_checkpoint(folder: Path, rng: random.Random) -> None:
    save(folder / "checkpoints", 5, _snapshot(rng))


def _write_pieces(folder: Path, rng: random.Random) -> None:
    whole = _snapshot(rng)
    lies = TensorLayout((4, 6), (4, 6), ((0, (0,)), (1, (1,))))
    network_layout = NetworkLayout(MESH, {"fc.weight": lies})
    target = folder / "checkpoints" / layout.step_name(5)
    target.parent.mkdir()
    with commit.staging(target.parent, 5) as staged:
        written: dict[str, Any] = {}
        for rank in range(MESH.size):
            region = tuple(slice(*edge) for edge in lies.region(MESH, rank))
            model = {**whole.model, "fc.weight": whole.model["fc.weight"][region].clone()}
            assert whole.optimizer is not None
            state = {
                **whole.optimizer["state"],
                "fc.weight": {"momentum": torch.ones(4, 6)[region].clone(), "step": 3.0},
            }
            mine = Snapshot(model, {**whole.optimizer, "state": state}, whole.state)
            contents = held_contents(5, mine, network_layout, rank)
            written |= write_pieces(staged, contents, rank)
        finish_pieces(staged, contents, written)
        commit.commit(staged, target)


def _seal(folder: Path, rng: random.Random) -> None:
    """Gives a checkpoint's spoilt files headers and a manifest that fit them."""
    path = folder / "checkpoints" / layout.step_name(5)
    for file in path.glob("*.safetensors"):
        if file.is_file() and rng.random() < 0.5:
            file.write_bytes(spoilt_safetensors(file.read_bytes(), rng))
    content = json.loads((path / layout.MANIFEST).read_text())
    names = [file.name for file in path.iterdir() if file.is_file() and file.name != layout.MANIFEST]
    content["files"] = {
        name: {"size": (path / name).stat().st_size, "sha256": layout.digest(path / name)} for name in names
    }
    (path / layout.MANIFEST).write_bytes(layout.manifest_text(content))


def spoilt_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A .safetensors file with one value of its header replaced."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(spoil_tree(header, rng)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _read_checkpoint(folder: Path) -> None:
    place = folder / "checkpoints"
    last, _ = newest(place)
    if last is None:
        resolve(folder, "best")
        return
    read_state(last)
    best = resolve(folder, "best")
    open_description(best).as_plain()
    open_checkpoint(best).snapshot()
    find_record(last, load(last).state)


def _write_pth(folder: Path, rng: random.Random) -> None:
    weights = {f"module.{name}": value for name, value in _snapshot(rng).model.items()}
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(4, 6)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    content: Any = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": weights,
        "best_acc1": torch.tensor(50.0),
        "optimizer": optimizer,
        "scheduler": {"step_size": 30, "gamma": 0.1, "last_epoch": 3, "base_lrs": [0.1]},
    }
    for _ in range(rng.choice((0, 1, 1, 2))):
        content = _spoilt(content, rng)
    torch.save(content, folder / "checkpoint.pth.tar", _use_new_zipfile_serialization=rng.random() < 0.7)


def _spoilt(tree: Any, rng: random.Random) -> Any:
    """A tree of tensors and plain data with one value of another kind."""
    values = (
        None,
        -1,
        "x",
        [],
        {},
        float("nan"),
        float("inf"),
        10**400,
        torch.ones(2),
        torch.tensor([]),
        (1,),
        b"x",
        1e300,
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(1).to_sparse(),
        torch.tensor(True),
        {1: 2},
        "9" * 5_000,
    )
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    if not keys or rng.random() < 0.25:
        return rng.choice(values)
    key = rng.choice(keys)
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[key] = _spoilt(tree[key], rng)
    return changed


def _read_pth(folder: Path) -> None:
    file = folder / "checkpoint.pth.tar"
    job = load_job({"checkpoint.pth_tar": "x", "model.name": "torchvision:resnet18"}, environment={}).job
    snapshot = read_foreign(file)
    if snapshot.optimizer is not None:
        name_optimizer(snapshot.optimizer, ["fc.weight", "fc.bias"])
    check_same_training(job, snapshot, str(file))
    describe_file(file)


def _write_safetensors(folder: Path, rng: random.Random) -> None:
    from safetensors.torch import save_file

    save_file(_snapshot(rng).model, folder / "net.safetensors", {"order": '["fc.weight", "fc.bias", "count"]'})
    if rng.random() < 0.6:
        file = folder / "net.safetensors"
        file.write_bytes(spoilt_safetensors(file.read_bytes(), rng))


def _read_safetensors(folder: Path) -> None:
    read_foreign(folder / "net.safetensors")
    open_description(folder / "net.safetensors").as_plain()
    open_checkpoint(folder / "net.safetensors").snapshot()


def _write_messages(folder: Path, rng: random.Random) -> None:
    said = [encode(rng.choice(AGENT), rng.randrange(2)) for _ in range(rng.randrange(1, 5))]
    (folder / "said.jsonl").write_bytes(b"".join(said))


def _read_messages(folder: Path) -> None:
    """A machine's agent says what it says, and is gone."""
    if not (folder / "said.jsonl").is_file():
        return
    command = ["cat", str(folder / "said.jsonl")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        (folder / "log").touch()
        link = AgentConnection(Machine("n2"), process, folder / "log", here=False)
        link.post(Hello())
        ending = supervise([link], [Orders({}, str(folder), Meeting((1,)))], Watch())
        first_cause(ending)
    finally:
        process.kill()
        process.wait()


def _write_times(folder: Path, _rng: random.Random) -> None:
    times = OpTimes(folder=folder)
    times._fresh = {name: OpTime(0.1, 0.2, 0.3, time.time()) for name in "ab"}
    times.save()


def _read_times(folder: Path) -> None:
    OpTimes(folder=folder)._read()


def _write_store(folder: Path, rng: random.Random) -> None:
    (folder / "store.json").write_text(json.dumps(rng.choice(STORE)))


def _read_store(folder: Path) -> None:
    """What whoever reaches the processes' store may write there."""
    content = _bytes(folder / "store.json")
    for kind in (said.Present, said.Twice, said.Told):
        told = said.understood(content, kind)
        if isinstance(told, said.Present | said.Twice):
            psutil.pid_exists(told.pid)
        if told:
            text = str(UserError(str(told), told.host))
            assert "\x1b" not in text


def _read_value(folder: Path) -> None:
    """What the three readers make of any bytes at all."""
    from manyhands.core import outside

    content = _bytes(folder / "any.json")
    for reader in (outside.parse_json, outside.parse_toml, outside.parse_yaml):
        try:
            reader(content)
        except UnreadableError:
            continue


READERS = [
    Reader("job", _text("job.toml", JOB), _read_job),
    Reader("flags", _text("flags.txt", FLAGS), _read_flags),
    Reader("words", write_words, read_words, only="nothing"),  # which are spoilt as they are written
    Reader("any", _text("any.json", ANY), _read_value),
    Reader("hosts", _text("hostfile", CLUSTERS["hostfile"]), _read_hostfile),
    *(
        Reader(f"cluster-{name}", _text(name, text), functools.partial(_read_machines, name))
        for name, text in CLUSTERS.items()
    ),
    Reader("places", _write_place, _read_place, only="place.json"),
    Reader("plan", _write_plan, _read_plan),
    Reader("cut", _write_plan, lambda folder: read_cut(folder / "plan.json")),
    Reader("checkpoint", _write_checkpoint, _read_checkpoint, _seal),
    Reader("pieces", _write_pieces, _read_checkpoint, _seal),
    Reader("pth-tar", _write_pth, _read_pth),
    Reader("safetensors", _write_safetensors, _read_safetensors),
    Reader("idx", data.write_idx_pair, data.read_idx, data.pack_idx),
    Reader("cifar", data.write_cifar, data.read_cifar, data.pack_cifar),
    Reader("archive", data.write_archive, data.read_archive, data.pack_archive),
    Reader("packed", data.write_packed, data.read_packed, data.seal_packed, "*.pack/*"),
    Reader("pictures", data.write_pictures, data.read_pictures),
    Reader("jpeg-box", data.write_jpeg, data.read_jpeg_box),
    Reader("report", write_run, read_report),
    Reader("run-files", write_run, read_small_files),
    Reader("messages", _write_messages, _read_messages),
    Reader("store", _write_store, _read_store),
    Reader("op-times", _write_times, _read_times),
]
