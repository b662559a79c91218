"""Versions, without importing what they are of."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "torchvision", "numpy", "torch-npu", "mindspore")
PACKAGE = Path(__file__).parents[2]
# NCCL comes as a package of its own, named after the CUDA that it is for.
NCCL = tuple(f"nvidia-nccl-cu{version}" for version in (11, 12, 13, 14))


def versions() -> dict[str, str]:
    """Of what training on several machines must agree in; what isn't installed is missing."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    nccl = [version for name in NCCL if (version := _version(name))]
    return {"manyhands": sys.modules["manyhands"].__version__, **found, **({"nccl": nccl[-1]} if nccl else {})}


def torchvision_misfit() -> str:
    """What torchvision says that is made for another torch than this one; empty where it can be imported."""
    found = versions()
    pins = metadata.requires("torchvision") or () if "torchvision" in found else ()
    made_for = next((pin[1] for line in pins if (pin := re.match(r"torch *\(?==([^;,)+ ]+)", line))), "")
    torch = found.get("torch", "none")
    # Also of another build: +cpu beside +cu132, or beside one that bears no such word.
    if made_for in {"", torch.partition("+")[0]} and _build("torch") == _build("torchvision"):
        return ""
    tried = subprocess.run(
        [sys.executable, "-P", "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    said = tried.stderr.strip().rpartition("\n")[2]
    made = f"is for torch {made_for}" if made_for not in {"", torch.partition("+")[0]} else "is a different build"
    misfit = f"torchvision {found['torchvision']} {made} and can't be imported with torch {torch}: {said}"
    return misfit if tried.returncode else ""


def has_compiler() -> bool:
    """Whether there is a C++ compiler, as torch.compile wants one."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))))


def package_hash() -> str:
    """Of manyhands' own source: two checkouts may bear the same version."""
    folder, digest = PACKAGE, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(name: str) -> str:
    """The word after the plus sign of a version."""
    return _version(name).partition("+")[2]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
