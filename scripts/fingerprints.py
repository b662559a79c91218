"""Fingerprints of what training computes: weights after 20 updates, plans, and the order and splits of folders.

To compare two commits, each in a checkout with an environment of its own, on one machine:

    python scripts/fingerprints.py write OLD --python ../old/.venv/bin/python
    python scripts/fingerprints.py write NEW
    python scripts/fingerprints.py compare OLD NEW

`write` runs the command line of that environment in 8 set-ups of training (float64, deterministic, one thread), 5 jobs
of `manyhands plan --no-measure` and 3 folders of pictures, and leaves the hashes in NEW/fingerprints.json with the
weights beside it. `compare` prints a line for each difference, with the largest difference of the weights, and fails
where there is one above 1e-12. Names after `write FOLDER` choose set-ups: `write NEW fsdp session`.

Hashes of weights depend on the machine and on torch, so no test compares them. scripts/fingerprints.json holds those
of one machine, to show which ones a commit has changed on purpose.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TOLERANCE = 1e-12
FILES = {
    "net.py": """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        convolution = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        super().__init__(*convolution, nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 6))
""",
    "loop.py": """
import manyhands, torch
from net import Net
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(1)
images = torch.randn(103, 1, 8, 8, dtype=torch.float64, generator=generator)
data = TensorDataset(images, (images.sum((1, 2, 3)) > 0).long() + 2 * (images[:, 0, 0, 0] > 0).long())
with manyhands.session(out="session", deterministic=True, cluster__threads=1, norm_group=4) as here:
    torch.manual_seed(0)
    network = Net().double()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    network, optimizer, samples = here.prepare(network, optimizer, data, batch=29)
    for _ in here.epochs(5):
        for x, y in samples:
            here.backward(torch.nn.functional.cross_entropy(network(x), y))
            optimizer.step()
            optimizer.zero_grad()
""",
    "plan.json": json.dumps(
        {"format": "plan/1", "mesh": {"dp": 2, "tp": 2}, "mode": "semi", "ops": {"0": "n@dp", "5": "n@dp o@tp"}}
    ),
}
# 103 samples in batches of 29 are 4 updates an epoch, the last of 16 samples.
COMMON = (
    "train synthetic:103x1x8x8x6 net.py:Net --device cpu --epochs 5 --batch 29 --quiet --set train.precision=fp64 "
    "--set train.deterministic=true --set train.channels_last=false --set cluster.threads=1 --set run.report=false "
    "--set checkpoint.every=5steps --set checkpoint.keep=9 --set train.evaluate_every=0"
)
TRAININGS = {
    "data": f"{COMMON} -n 3 --set data.augment=crop-flip --set train.norm_group=4",
    "fsdp": f"{COMMON} -n 3 --parallel fsdp",
    "hybrid": f"{COMMON} -n 4 --parallel hybrid --mesh dp=2,tp=2",
    "auto": f"{COMMON} -n 4 --parallel auto --set parallel.plan=plan.json",
    "session": "loop.py",
    "powersgd": f"{COMMON} -n 3 --sync powersgd",
    "shares": f"{COMMON} -n 3 --set cluster.shares=[16,8,5]",
    # step 10 is within an epoch
    "resume": f"{COMMON} -n 3 --set data.augment=crop-flip --resume data/checkpoints/step-00000010",
}
PLANS = {
    "digits": "digits mlp -n 2",
    "cnn": "synthetic:999x3x32x32x10 cnn -n 4",
    "resnet": "synthetic:999x3x32x32x10 resnet18 -n 4 --batch 256",
    "memory": "synthetic:999x3x32x32x10 resnet50 -n 8 --batch 256 --memory 2GiB",
    "link": "synthetic:999x3x32x32x10 resnet18 -n 4 --batch 256 --link 100mbit",
}
PICTURES = f"{COMMON} -n 2 --data.image-size 8".replace("synthetic:103x1x8x8x6 net.py:Net", "{} mlp")


def main() -> int:
    """Writes the fingerprints of one environment, or compares those of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("names", nargs="*")
    write.add_argument("--python", default=sys.executable)
    compared = commands.add_parser("compare")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.old, given.new)
    given.folder.mkdir(parents=True, exist_ok=True)
    record, errors = take(given.folder.absolute(), str(Path(given.python).absolute()), given.names)
    file = given.folder / "fingerprints.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and given.names else {}
    file.write_text(
        json.dumps(
            {key: one for key, one in before.items() if key.split()[1] not in given.names} | record,
            indent=1,
            sort_keys=True,
        )
        + "\n",
        encoding="utf-8",
    )
    print("\n".join(errors))
    return bool(errors)


def take(folder: Path, python: str, names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The fingerprints of those names, or of all, by name; and what failed."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    make_pictures(folder)
    makers: dict[str, Callable[[], Any]] = {
        **{f"weights {name}": lambda name=name, line=line: train(folder, python, name, line)
           for name, line in TRAININGS.items()},
        **{f"plan {name}": lambda line=line: plan(folder, python, line) for name, line in PLANS.items()},
        **{f"data {name}": lambda name=name: data(folder, python, name)
           for name in ("one", "splits", "linked")},
    }  # fmt: skip
    found, errors = dict[str, Any](), list[str]()
    for name, make in makers.items():
        if not names or name.split()[1] in names:
            try:
                found[name] = make()
            except subprocess.CalledProcessError as error:
                errors.append(f"{name} failed: {error.stderr.decode()[-2000:]}")
    return found, errors


def train(folder: Path, python: str, name: str, line: str) -> dict[str, str]:
    """Trains, and hashes the last checkpoint's weights."""
    shutil.rmtree(folder / name, ignore_errors=True)
    launch = ["train", "loop.py", "-n", "3", "--quiet"] if line == "loop.py" else [*line.split(), "--out", name]
    run(folder, python, *launch)
    last = max((folder / name / "checkpoints").glob("step-*"))
    weights = tensors(last / "model.safetensors")
    return {"step": last.name, **{key: digest(value.tobytes()) for key, value in sorted(weights.items())}}


def plan(folder: Path, python: str, line: str) -> dict[str, Any]:
    """The plan of a job, without times, since nothing is measured."""
    file = folder / "found.json"
    run(folder, python, "plan", *line.split(), "--no-measure", "--out", str(file), "--force", "--device-model", "a100")
    found = json.loads(file.read_text(encoding="utf-8"))
    return {key: found.get(key) for key in ("mesh", "mode", "ops", "batch", "shares")}


def data(folder: Path, python: str, name: str) -> dict[str, Any]:
    """Digests of the order of samples, of what each split holds, and of weights trained on it."""
    out = f"trained-{name}"
    shutil.rmtree(folder / out, ignore_errors=True)
    run(folder, python, *PICTURES.format(f"pictures/{name}").split(), "--out", out)
    last = max((folder / out / "checkpoints").glob("step-*"))
    state = json.loads((last / "state.json").read_text(encoding="utf-8"))
    weights = b"".join(value.tobytes() for _, value in sorted(tensors(last / "model.safetensors").items()))
    trained = state["trained"]
    kept = {"classes": trained["classes"], **trained["digests"]}
    return {"order": state["job"], **kept, "weights": digest(weights)}


def run(folder: Path, python: str, *arguments: str) -> None:
    """Runs the command line of an environment in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "manyhands", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=300)


def make_pictures(folder: Path) -> None:
    """One folder of classes; one with train, val and test; one with links and a name that isn't UTF-8."""
    generator, root = np.random.default_rng(0), folder / "pictures"
    shutil.rmtree(root, ignore_errors=True)
    for place in ("one", "splits/train", "splits/val", "splits/test", "linked"):
        for number in range(60):
            file = root / place / f"class{number % 3}" / f"{number:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(file)
    for number in range(3):
        linked = root / "linked" / f"class{number}"
        (linked / "link.png").symlink_to(root / "one" / f"class{number}" / f"{number:03}.png")
        shutil.copy(
            root / "one" / f"class{number}" / f"{number + 3:03}.png",
            Path(os.fsdecode(os.fsencode(linked) + b"/na\xefve.png")),
        )
    (root / "linked" / "class3").symlink_to(root / "splits" / "test" / "class0")


def tensors(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file as numpy arrays, read here so that any environment's numpy will do."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    kinds = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}
    header = json.loads(content[8 : 8 + length])
    return {
        name: np.frombuffer(content[8 + length + one["data_offsets"][0] : 8 + length + one["data_offsets"][1]],
                            kinds[one["dtype"]])
        for name, one in header.items() if name != "__metadata__"
    }  # fmt: skip


def digest(content: bytes) -> str:
    """The beginning of a hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def compare(old: Path, new: Path) -> int:
    """Prints what differs; 1 where anything does by more than the tolerance."""
    one, other = (json.loads((each / "fingerprints.json").read_text(encoding="utf-8")) for each in (old, new))
    failed = False
    for name in sorted(one.keys() & other.keys()):
        keys = [key for key in one[name].keys() & other[name].keys() if one[name][key] != other[name][key]]
        beside = ", ".join(sorted(one[name].keys() ^ other[name].keys()))
        if not keys:
            print(f"{name}: equal" + (f"; only in one: {beside}" if beside else ""))
            continue
        difference = math.inf
        if name.startswith("weights") and not beside and "step" not in keys:
            difference = largest_difference(old, new, name.split()[1], one[name]["step"])
        failed |= not difference <= TOLERANCE
        print(f"{name}: differs by {difference:.3g} in {', '.join(sorted(keys))}")
    for name in sorted(one.keys() ^ other.keys()):
        print(f"{name}: only in {old if name in one else new}")
    return failed


def largest_difference(old: Path, new: Path, name: str, step: str) -> float:
    """Of any weight of a checkpoint in both folders."""
    file = Path(name, "checkpoints", step, "model.safetensors")
    one, other = tensors(old / file), tensors(new / file)
    return max(float(np.abs(one[key] - other[key]).max()) for key in one)


if __name__ == "__main__":
    sys.exit(main())
