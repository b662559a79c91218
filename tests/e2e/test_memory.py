"""A network that doesn't fit data parallel under a limit of memory that the system sets, and fits split."""

import json
import subprocess
import sys

import pytest

from tests.e2e.command import NETS, finish, shell

CLASSES, FEATURES = 100_000, 1024
HEAD_KIB = CLASSES * FEATURES * 4 // 1024
# Beyond what a process takes that has imported all. Data parallel keeps weights, gradients, two slots of Adam and more
# beside them: not even seven times the head were enough. Split over four, the most is at the start, before the head is
# cut: 3.9 times. Threads' stacks count too, and a machine of many processors has many.
ALLOWED_KIB = 5 * HEAD_KIB
IMPORTS = "import torch, torchvision, torch.distributed.elastic.agent.server.local_elastic_agent"
OURS = "import manyhands.worker.entry as ours; ours.import_training()"
TOLD = f"{IMPORTS}; {OURS}; print(open('/proc/self/status').read())"


def _base_kib():
    """What a process has before it does anything: the system counts imports too."""
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    return next(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("VmData:"))


def _train(out, limit_kib, flags):
    line = (
        f"ulimit -d {limit_kib} && exec manyhands train synthetic:64x1x8x8x{CLASSES} {NETS}:wide -n 4 --batch 32 "
        "--set train.max_steps=2 --set train.evaluate_every=0 --set checkpoint.every=never "
        f"--set checkpoint.pieces=true --set train.optimizer=adamw --set train.lr=0.001 --out {out} {flags}"
    )
    return finish(shell(line))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all private memory on Linux alone")
def test_a_head_of_100000_classes_trains_split_where_data_parallel_runs_out_of_memory(tmp_path):
    limit_kib = _base_kib() + ALLOWED_KIB
    whole = _train(tmp_path / "data", limit_kib, "--parallel data")
    assert whole.code == 1, whole.err
    assert "out of memory" in whole.err
    assert not list((tmp_path / "data").glob("checkpoints/step-*"))

    split = _train(tmp_path / "auto", limit_kib, "--parallel auto --parallel.memory 768MiB")
    assert split.code == 0, split.err
    plan = json.loads((tmp_path / "auto" / "plan.json").read_text())
    assert plan["mode"] == "auto"
    candidates = {row["name"]: row["fits"] for row in plan["candidates"]}
    assert not candidates["data parallel"]
    assert list((tmp_path / "auto").glob("checkpoints/step-00000002"))
