"""torchvision's published weights: looked up in torch hub's cache, or downloaded there once."""

import pickle
import re
import warnings
from pathlib import Path

import torch

from manyhands.core.download import Digest, download
from manyhands.core.errors import UserError
from manyhands.core.files import one_at_a_time

# torchvision's file names end in the first digits of their SHA-256.
_DIGEST = re.compile(r"-([0-9a-f]{8,})\.")


def fetch_weights(url: str) -> Path:
    """Makes sure that torch hub's cache has the file of this address, and that it holds tensors only.

    Processes of one machine that ask at once download it once. Raises UserError: it isn't there and can't be had, or
    holds something else.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.is_file():
        with one_at_a_time(path):
            if not path.is_file():
                _download(url, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle protocol that torch itself doesn't write
            torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path.name} is damaged or holds more than weights", str(path), _hints(url, path)) from error
    return path


def _download(url: str, path: Path) -> None:
    begin = _DIGEST.search(path.name)
    problem = download(url, path, Digest("sha256", begin[1]) if begin else None)
    if problem:
        raise UserError(f"{path.name} can't be downloaded: {problem}", url, _hints(url, path))


def _hints(url: str, path: Path) -> tuple[str, ...]:
    return (f"download {url}", f"and save the file as {path}", "or leave model.pretrained out")
