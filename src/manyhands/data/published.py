"""Where the published files of a named data set lie: found in a few usual places, or fetched."""

from pathlib import Path

from manyhands.core.errors import UserError
from manyhands.data.download import fetch
from manyhands.data.known import spelt
from manyhands.data.options import DataOptions


def find_file(name: str, places: list[Path]) -> Path | None:
    """The file in the first place that has it, packed (.gz) or unpacked; "x-idx3" may be spelt "x.idx3"."""
    return next((there for place in places if (there := spelt(place, name))), None)


def fetch_file(name: str, urls: tuple[str, ...], md5: str, folder: Path, options: DataOptions) -> Path:
    """Fetches a file into a named data set's folder. Raises UserError: downloads are off, or it can't be fetched."""
    if not options.download:
        mend = (f"put {name} there", "or allow the download: --data.download")
        raise UserError(f"{folder} has no {name}", str(folder), mend)
    return fetch(f"{folder.name}/{name}", urls, md5, folder / name)
