"""Seconds of ops on this device: measured within a budget, kept on disk, estimated where neither is there."""

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch

from manyhands.core.outside import parse_json, read_bytes

FORMAT = "op-times/1"
_REPEATS = 5
_LONG_S = 0.1
# What devices reach in practice, until one has been measured: (operations, bytes) per second.
_ASSUMED_RATES = {"cpu": (3e10, 8e9), "cuda": (2e13, 6e11), "mps": (3e12, 1e11)}
_MATRIX, _COPIED_VALUES = 384, 1 << 21


def environment(device: str) -> dict[str, str]:
    """What seconds of an op depend on besides the op itself."""
    name = platform.processor() or platform.machine()
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "torch": torch.__version__,
        "device": f"{torch.device(device).type} {name}",
        "threads": str(torch.get_num_threads()),
    }


class OpTimes:
    """Times of ops by key.

    A key says all that the seconds depend on: the op, its local shapes, dtype and memory format. Files are one for each
    environment; what processes write at the same time adds up, and a broken file is begun anew.

    Args:
        device: torch's name of the device.
        budget_s: what may be spent on measuring; afterwards seconds are estimated from operations and bytes.
        folder: where files are kept; the user's cache folder if None.

    Attributes:
        notes: sentences on the files.
        measured: how many ops were timed.
        estimated: how many were not.
        failed: by key, why an op could not be run by itself; it is estimated then.
    """

    def __init__(self, device: str = "cpu", budget_s: float = 30.0, folder: Path | None = None) -> None:
        self._device = torch.device(device)
        self._left_s = budget_s
        self._environment = environment(device)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[:16]
        self._file = (folder or platformdirs.user_cache_path("manyhands") / "planner") / f"ops-{digest}.json"
        self.notes: list[str] = []
        self.measured = 0
        self.estimated = 0
        self.failed: dict[str, str] = {}
        self._fresh: dict[str, float] = {}
        self._seconds = self._read()
        self._rates: tuple[float, float] | None = None

    @property
    def file(self) -> Path:
        """Where this environment's times are kept."""
        return self._file

    def seconds(
        self, key: str, make: Callable[[], Callable[[], object]], operations: float, moved_bytes: float
    ) -> float:
        """Seconds of an op, forward and backward.

        Args:
            key: names the op.
            make: gives a function that runs the op once; only called if it is to be measured.
            operations: additions and multiplications of both directions, for the estimate.
            moved_bytes: that are read and written in both directions, for the estimate.
        """
        if key not in self._seconds:
            taken = self._tried(key, make) if self._left_s > 0 and key not in self.failed else None
            if taken is None:
                self.estimated += 1
                return self.estimate(operations, moved_bytes)
            self._seconds[key] = self._fresh[key] = taken
            self.measured += 1
        return self._seconds[key]

    def _tried(self, key: str, make: Callable[[], Callable[[], object]]) -> float | None:
        """What `_measure` gives; None where the op fails outside its network, on values that it never sees there."""
        try:
            return self._measure(make)
        except Exception as error:  # noqa: BLE001 - whatever an op says of made-up values, the search goes on
            self.failed[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return None

    def estimate(self, operations: float, moved_bytes: float) -> float:
        """The roofline: whatever takes longer, computing or moving, at the rates of a product and a copy."""
        if self._rates is None:
            self._rates = self._measured_rates()
        return max(operations / self._rates[0], moved_bytes / self._rates[1])

    def save(self) -> None:
        """Adds what was measured to the file, whole or not at all."""
        if not self._fresh:
            return
        content = {"format": FORMAT, "environment": self._environment, "seconds": self._read() | self._fresh}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._file.parent, prefix=f".{self._file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1, sort_keys=True)
        Path(name).replace(self._file)
        self._fresh = {}

    def _read(self) -> dict[str, float]:
        try:
            content = parse_json(read_bytes(self._file), infinite=True)
            return _checked(content, self._environment)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self.notes.append(f"the cache of op times {self._file} can't be read ({error}); ops are measured anew")
            return {}

    def _measure(self, make: Callable[[], Callable[[], object]]) -> float:
        began = time.perf_counter()
        run = make()
        run()
        self._wait()
        taken: list[float] = []
        while len(taken) < _REPEATS and (not taken or sum(taken) < _LONG_S):
            start = time.perf_counter()
            run()
            self._wait()
            taken.append(time.perf_counter() - start)
        self._left_s -= time.perf_counter() - began
        return statistics.median(taken)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _measured_rates(self) -> tuple[float, float]:
        """Of a matrix product and a copy; assumed ones where there is no budget at all."""
        known = [self._seconds.get(key) for key in ("rate of a product", "rate of a copy")]
        if known[0] and known[1]:
            product_s, copy_s = known[0], known[1]
        elif self.measured == 0:
            return _ASSUMED_RATES.get(self._device.type, _ASSUMED_RATES["cuda"])
        else:
            product_s, copy_s = self._measure(self._product), self._measure(self._copy)
            self._fresh |= {"rate of a product": product_s, "rate of a copy": copy_s}
            self._seconds |= self._fresh
        return 2 * _MATRIX**3 / max(product_s, 1e-9), 8 * _COPIED_VALUES / max(copy_s, 1e-9)

    def _product(self) -> Callable[[], object]:
        left, right = torch.ones(2, _MATRIX, _MATRIX, device=self._device)
        return lambda: left @ right

    def _copy(self) -> Callable[[], object]:
        source = torch.ones(_COPIED_VALUES, device=self._device)
        return source.clone


def _checked(content: Any, environment: dict[str, str]) -> dict[str, float]:
    """The times in a file.

    Raises:
        ValueError: it isn't such a file.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("environment") != environment:
        raise ValueError("it has another form")
    seconds = content.get("seconds")
    if not isinstance(seconds, dict):
        raise ValueError("it has no times")
    if wrong := [key for key, value in seconds.items() if not _is_time(value)]:
        raise ValueError(f'"{wrong[0]}" has no time')
    return {str(key): float(value) for key, value in seconds.items()}


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
