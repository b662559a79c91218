"""Six of torchvision's networks and six of timm's in every mode: two updates of two processes are those of one."""

import copy
import math
import time
import warnings

import pytest
import torch
from torchvision import models

from manyhands.core.world import World
from manyhands.planner.choose import LEAST_ROUNDS
from manyhands.planner.find import SearchResult
from manyhands.worker import plan_search
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import EXACT, built, updates

# Of each kind of op that no smaller network of test_plans has: grouped convolutions, windows, attention over grids.
TORCHVISION = ("efficientnet_b0", "maxvit_t", "regnet_y_400mf", "squeezenet1_0", "swin_t", "vit_of_two_layers")
# Tokens as rows, index buffers, keyword arguments, code that can't be traced, GroupNorm, LayerNorm and attention over
# channels.
TIMM = (
    "timm:levit_128s", "timm:efficientformerv2_s0", "timm:vit_tiny_patch16_224", "timm:mobilevit_xxs",
    "timm:poolformer_s12", "timm:edgenext_xx_small",
)  # fmt: skip
MODES = ("single", "data", "fsdp", "semi", "auto")
CLASSES, BATCH, STEPS = 5, 4, 2
# Names that timm's networks call what they draw with: shares of values, branches and positions that are dropped.
SHARES = ("p", "dropout", "attention_dropout", "drop_prob", "attn_drop_rate", "attn_drop_p", "drop_rate")


def build(name):
    """A network of either library, and the size of its pictures: as small as it takes, of MaxVit a small one."""
    torch.manual_seed(0)
    if name.startswith("timm:"):
        return _of_timm(name.removeprefix("timm:"))
    if name == "vit_of_two_layers":  # searching and trying vit_b_32's plans takes 7 GB a process
        return models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES), 32
    if name == "maxvit_t":
        return models.MaxVit((64, 64), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES), 64
    return models.get_model(name, weights=None, num_classes=CLASSES), 64


def _of_timm(name):
    import timm

    if name.startswith(("vit_", "levit_")):  # are built for any size
        return timm.create_model(name, num_classes=CLASSES, img_size=64), 64
    wanted = timm.get_pretrained_cfg(name)
    return timm.create_model(name, num_classes=CLASSES), wanted.input_size[-1] if wanted.fixed_input_size else 64


def without_draws(model):
    """The same network with nothing dropped by chance, so that all modes must give one result."""
    for module in model.modules():
        for word in SHARES:
            if isinstance(getattr(module, word, None), float) and word in vars(module):
                setattr(module, word, 0.0)
    return model


def train(world, mode, model, size):
    """The whole network's tensors after two updates under a mode."""
    world = World() if mode == "single" else world  # each process by itself is one alone
    flags = {
        "data.name": f"synthetic:{2 * BATCH}x3x{size}x{size}x{CLASSES}", "train.batch": BATCH, "train.epochs": 1,
        "train.lr": 0.001, **EXACT, "parallel.mode": mode,
        "data.workers": 0, "train.norm_group": BATCH, "run.report": False,
        "parallel.pin": ("loss=o@dp",) if mode == "semi" else (),
    }  # fmt: skip
    with built(world, model, flags, as_worker=True) as trainer:
        for _ in updates(trainer, STEPS):
            pass
        return trainer.network.full_state_dict()


def difference(got, wanted):
    """The largest relative difference of a tensor, and its name."""
    worst = 0.0, ""
    for name, tensor in wanted.items():
        scale = max(tensor.abs().max().item(), 1e-3) if tensor.is_floating_point() and tensor.numel() else 1.0
        if tensor.numel():
            worst = max(worst, ((got[name] - tensor).abs().max().item() / scale, name))
    return worst


def compare(world, name):
    """(mode, seconds, largest difference from one process, its tensor or what went wrong) for each mode.

    Ops are timed and plans are tried as ever, but for a shorter time, and fewer of them.
    """
    plan_search.TIMES_BUDGET_S, plan_search.ROUNDS = 1.0, LEAST_ROUNDS
    SearchResult.finalists.__defaults__ = (1,)
    model, size = build(name)
    model = without_draws(model).double()
    found, alone = [], None
    for mode in MODES:
        started = time.monotonic()
        try:
            got = train(world, mode, copy.deepcopy(model), size)
            alone = alone or got
            worst = difference(got, alone)
        except Exception as error:  # noqa: BLE001 - any failure of a network becomes a row of the table
            worst = math.inf, f"{type(error).__name__}: {error}".partition("\n")[0]
        found.append((mode, time.monotonic() - started, *worst))
    return found


def compare_all(world, names):
    """The same for several networks, by name."""
    torch.set_num_threads(1)
    # Nothing here works in place on what a network gives.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    return {name: compare(world, name) for name in names}


# Networks that train alike on any number of processes (docs/experiments/networks.md). Each has processes of its own,
# since a large one doesn't return all its memory.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TORCHVISION, *TIMM])
def test_every_mode_trains_every_family_alike(name):
    pytest.importorskip("timm")
    found = run_on_ranks(compare_all, 2, (name,))
    wrong = [
        f"{name} {mode} on rank {rank}: {error:.0e} {what}"
        for rank, networks in enumerate(found)
        for name, rows in networks.items()
        for mode, _, error, what in rows
        if not error <= 1e-6
    ]
    assert wrong == []
    assert all(len(rows) == 5 for networks in found for rows in networks.values())
