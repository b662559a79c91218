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
from tests.processes.updates import EXACT, built, make_updates

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


def without_draws(model):
    """The same network with nothing dropped by chance, so that all modes must give one result."""
    for module in model.modules():
        for word in SHARES:
            if isinstance(getattr(module, word, None), float) and word in vars(module):
                setattr(module, word, 0.0)
    return model


def build(name):
    """A network of either library, where nothing is dropped by chance so that all modes give one result; its pictures.

    These are as small as it takes, of MaxVit a small one.
    """
    torch.manual_seed(0)
    library, _, own = name.rpartition(":")
    size = 64
    if library:
        import timm

        sized: dict = {"img_size": size} if own.startswith(("vit_", "levit_")) else {}  # are built for any size
        known = timm.get_pretrained_cfg(own)
        size = known.input_size[-1] if known.fixed_input_size and not sized else size
        model = timm.create_model(own, num_classes=CLASSES, **sized)
    elif name == "vit_of_two_layers":  # searching and trying vit_b_32's plans takes 7 GB a process
        size = 32
        model = models.VisionTransformer(size, 8, 2, 2, 32, 64, num_classes=CLASSES)
    elif name == "maxvit_t":
        model = models.MaxVit((64, 64), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES)
    else:
        model = models.get_model(name, weights=None, num_classes=CLASSES)
    return without_draws(model).double(), size


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
        make_updates(trainer, STEPS)
        return trainer.network.full_state_dict()


def compare(world, name):
    """(mode, seconds, largest difference from one process, its tensor or what went wrong) for each mode.

    Ops are timed and plans are tried as ever, but for a shorter time, and fewer of them.
    """
    torch.set_num_threads(1)
    # Nothing here works in place on what a network gives.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    plan_search.TIMES_BUDGET_S, plan_search.ROUNDS = 1.0, LEAST_ROUNDS
    SearchResult.finalists.__defaults__ = (1,)
    model, size = build(name)
    found, alone = [], None
    for mode in MODES:
        started = time.monotonic()
        try:
            got = train(world, mode, copy.deepcopy(model), size)
            alone = alone or got
            worst = max(
                ((got[name] - one).abs().max().item() / max(one.abs().max().item(), 1e-3), name)
                for name, one in alone.items()
                if one.numel()
            )
        except Exception as error:  # noqa: BLE001 - any failure of a network becomes a row of the table
            worst = math.inf, f"{type(error).__name__}: {error}".partition("\n")[0]
        found.append((mode, time.monotonic() - started, *worst))
    return found


# Networks that train alike on any number of processes (docs/experiments/networks.md). Each has processes of its own,
# since a large one doesn't return all its memory.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TORCHVISION, *TIMM])
def test_every_mode_trains_every_family_alike(name):
    for found in run_on_ranks(compare, 2, name):
        assert len(found) == len(MODES)
        assert [row for row in found if not row[2] <= 1e-6] == []
