"""Fills a folder with the wheels that manyhands needs beside torch and torchvision, for a machine without a network.

    python scripts/gpu_wheels.py FOLDER --python-version 3.12 --machine x86_64

Nothing in it is installed there: `tests/gpu` unpacks it for its own processes, and torch, torchvision, numpy and
pillow stay those of that machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path

# What torch and torchvision bring is that machine's own; but for packages in plain Python that ours need newer.
NAMES = (
    "annotated-types", "attrs", "cloudpickle", "contourpy", "cycler", "cyclopts", "docstring-parser", "filelock",
    "fonttools", "highspy", "jinja2", "kiwisolver", "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "packaging",
    "platformdirs", "psutil", "pydantic", "pydantic-core", "pygments", "pyparsing", "python-dateutil", "pyyaml", "rich",
    "rich-rst", "safetensors", "simplejpeg", "tomli-w", "typing-extensions", "typing-inspection", "tzdata",
)  # fmt: skip
# pip takes a wheel whose tag is one of these, letter for letter.
GLIBC = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (5, 12, *range(17, 40))))
MOST_BYTES = 64 << 20


def pinned(constraints: Path) -> list[str]:
    """The names with the exact versions that the tests were run with."""
    lines = [line for line in constraints.read_text().splitlines() if "==" in line]
    versions = {line.partition("==")[0].replace("_", "-").lower(): line for line in lines}
    return [versions[name] for name in NAMES if name in versions]


def main() -> None:
    """Downloads what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform={name}_{given.machine}" for name in GLIBC]
    wanted = pinned(Path(__file__).parents[1] / "constraints.txt")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--implementation=cp", f"--python-version={given.python_version}", *platforms,
         f"--dest={given.folder}", *wanted],
        check=True,
    )  # fmt: skip
    found = sorted(given.folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in found)
    if size > MOST_BYTES:
        raise SystemExit(f"{given.folder}: {size >> 20} MiB of wheels, and at most {MOST_BYTES >> 20} are meant to be")
    print(f"{given.folder}: {len(found)} wheels, {size / 2**20:.1f} MiB, for Python {given.python_version}")


if __name__ == "__main__":
    main()
