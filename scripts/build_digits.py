"""Rebuilds src/manyhands/data/digits/*.gz from the copy that scikit-learn carries.

Run it where scikit-learn is installed: `python scripts/build_digits.py`. The files come out
byte for byte the same each time.
"""

import gzip
import struct
from pathlib import Path

import torch
from sklearn.datasets import load_digits

PLACE = Path(__file__).parent.parent / "src" / "manyhands" / "data" / "digits"


def main() -> None:
    """Writes two pairs of files: every fifth digit is for evaluation, the others for training."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)  # 0 … 16 become 0 … 255
    labels = torch.from_numpy(bunch.target).to(torch.uint8)
    test = torch.arange(len(images)) % 5 == 0
    parts = {"train": ~test, "test": test}
    for name, chosen in parts.items():
        for kind, values in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen])):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            content = gzip.compress(header + values.numpy().tobytes(), mtime=0)  # without a date
            (PLACE / f"{name}-{kind}-ubyte.gz").write_bytes(content)
        print(name, int(chosen.sum()))
    pixels = images[~test].double() / 255
    print(f"mean {pixels.mean():.4f} std {pixels.std(correction=0):.4f}")


if __name__ == "__main__":
    main()
