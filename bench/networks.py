"""Which networks train in which mode? python -m bench.networks OUT.md [NAME …] [--minutes 60].

Two updates of two processes in every mode, from the same start and with nothing drawn, against those of one process.
Without names: all of torchvision's below 100 million parameters, and twenty of timm's. Appends a row for each network,
passes over those that OUT.md has, and stops when the time is over.
"""

import argparse
import time
from pathlib import Path

from tests.processes.families import MODES, build, compare_all
from tests.processes.ranks import run_on_ranks
from torchvision import models

MOST = 100e6
TIMM = (
    "levit_128s", "efficientformerv2_s0", "vit_tiny_patch16_224", "tf_efficientnet_lite0", "mobilevit_xxs",
    "poolformer_s12", "convnext_atto", "edgenext_xx_small", "mobilenetv3_small_050", "regnety_002", "resnetv2_50",
    "ghostnet_100", "repvgg_a0", "deit_tiny_distilled_patch16_224", "mixer_s32_224", "xcit_nano_12_p16_224",
    "hardcorenas_a", "nf_regnet_b0", "fastvit_t8", "swin_tiny_patch4_window7_224",
)  # fmt: skip
# Not a traceback, but how far rounding in double precision may take two updates.
SAME = 1e-6


def _names():
    """The smallest first, so that a table that isn't finished holds most kinds."""
    known = models.list_models(module=models)
    sizes = {name: next(iter(models.get_model_weights(name))).meta["num_params"] for name in known}
    smallest = sorted((name for name in known if sizes[name] < MOST), key=sizes.__getitem__)
    return [*(f"timm:{name}" for name in TIMM), *smallest]


def _cell(errors, reasons):
    if max(errors) <= SAME:
        return "0" if max(errors) == 0 else f"{max(errors):.0e}"
    return f"**{max(errors):.0e}** {next(filter(None, reasons))[:80]}"


def _row(name):
    model, size = build(name)
    millions = sum(one.numel() for one in model.parameters()) / 1e6
    found = [ranks[name] for ranks in run_on_ranks(compare_all, 2, (name,))]
    cells = [
        _cell([rows[place][2] for rows in found], [rows[place][3] for rows in found]) for place in range(len(MODES))
    ]
    return f"| `{name}` | {millions:.1f} | {size} | {' | '.join(cells[1:])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    known = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    for name in options.names or _names():
        if f"`{name}`" in known or time.monotonic() > end:
            continue
        row = _row(name)
        print(row, flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(row + "\n")


if __name__ == "__main__":
    main()
