"""Rebuilds src/manyhands/data/digits/*.gz from the copy that scikit-learn carries.

Run it where scikit-learn is installed: `PYTHONPATH=src python scripts/build_digits.py`. The files come out
byte for byte the same each time.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits

from manyhands.data.records import write_idx

PLACE = Path(__file__).parent.parent / "src" / "manyhands" / "data" / "digits"


def main() -> None:
    """Writes two pairs of files: every fifth digit is for evaluation, the others for training."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)  # 0 … 16 become 0 … 255
    labels = torch.from_numpy(bunch.target).to(torch.uint8)
    test = torch.arange(len(images)) % 5 == 0
    parts = {"train": ~test, "test": test}
    for name, chosen in parts.items():
        write_idx(PLACE / f"{name}-images-idx3-ubyte.gz", images[chosen])
        write_idx(PLACE / f"{name}-labels-idx1-ubyte.gz", labels[chosen])
        print(name, int(chosen.sum()))
    pixels = images[~test].double() / 255
    print(f"mean {pixels.mean():.4f} std {pixels.std(correction=0):.4f}")


if __name__ == "__main__":
    main()
