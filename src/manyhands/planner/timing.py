"""Times code on a device reproducibly, as the fastest of several repeats, and measures their variation.

The fastest repeat is used, because other load can only slow a repeat down. On a busy CPU, threads also wait for each
other, so one thread is timed, and the CPU time is divided by the expected speedup of all threads. Under a CPU quota, a
repeat between two pauses seems too fast, so the CPU time is divided by the number of cores in the quota.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
import torch
from pydantic import BaseModel, Field, ValidationError

from manyhands.core.devices import device_name, wait_for_device
from manyhands.core.files import parse_json, read_bytes, replaced_on_success
from manyhands.core.machine import cores

BUSY = 0.15  # the machine is busy if other processes use more than this fraction of its processors
_EFFICIENCY = 0.85  # approximate speed of each further thread, relative to the first
_STAT = Path("/proc/stat")
_WATCHED_S = 0.1  # processor times have a resolution of 0.01 s


@dataclass(frozen=True)
class Timing:
    """A measured time, and its variation over repeats."""

    seconds: float  # of the fastest repeat, or the median of CPU times
    # relative difference between the first-quartile repeat (at least the second) and the fastest; 0 for one repeat
    spread: float = 0.0


def time_function(run: Callable[[], object], device: str, most: int, budget_s: float, *, busy: bool = False) -> Timing:
    """Times 1 to `most` calls of `run`, after a warm-up. Returns the fastest; on a busy or limited CPU, the median."""
    threads, clock, factor = torch.get_num_threads(), time.perf_counter, 1.0
    if torch.device(device).type == "cpu":
        if (allowed := cores()) < threads:
            clock, factor = time.process_time, 1 / allowed
        elif busy:
            clock, factor = time.process_time, 1 / (1 + (threads - 1) * _EFFICIENCY)
            torch.set_num_threads(1)
    taken, began = list[float](), time.perf_counter()
    try:
        while not taken or (len(taken) < most and time.perf_counter() - began < budget_s):
            start = clock()
            run()
            wait_for_device(device)
            taken.append(clock() - start)
    finally:
        torch.set_num_threads(threads)
    taken.sort()
    near = taken[min(len(taken) - 1, max(1, len(taken) // 4))]
    # CPU time excludes waiting; its variation is that of the work itself.
    usual = taken[0] if clock is time.perf_counter else statistics.median(taken)
    return Timing(usual * factor, near / taken[0] - 1 if taken[0] > 0 else 0.0)


class OtherLoad:
    """Measures the CPU time that other processes have used since the creation of this object."""

    def __init__(self) -> None:
        self._began = self._cpu_times()

    def share(self) -> float:
        """Returns the fraction (0 to 1) of the CPU time that other processes used. Measures for at least 0.1 s."""
        time.sleep(max(0.0, self._began[1] + _WATCHED_S - time.perf_counter()))
        busy_s, wall_s, own_s = (now - before for now, before in zip(self._cpu_times(), self._began, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1))))

    def _cpu_times(self) -> tuple[float, float, float]:
        """Returns seconds of (busy processors since boot or 0 if unknown, wall clock, CPU time of this process)."""
        try:
            words = _STAT.read_text().split("\n", 1)[0].split()
            user, nice, system, _idle, _waiting, *rest = map(int, words[1:9])
            busy_s = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            busy_s = 0.0
        return busy_s, time.perf_counter(), time.process_time()


_REPEATS = 5
_LONG_S = 0.1
_DAY_S, MOST_DAYS = 86400.0, 30  # drivers, clocks and libraries change: older times are measured again
# (operations, bytes) per second that devices reach in practice, used until a measurement.
_ASSUMED_RATES = {"cpu": (3e10, 8e9), "mps": (3e12, 1e11), "others": (2e13, 6e11)}
_MATRIX, _COPIED_VALUES = 384, 1 << 21


def timing_environment(device: str, threads: int = 0) -> dict[str, str]:
    """Returns the conditions on which op times depend: torch version, device, threads and cores."""
    return {
        "torch": torch.__version__,
        "device": f"{torch.device(device).type} {device_name(device)}",
        "threads": str(threads or torch.get_num_threads()),
        "cores": f"{cores():.3g}",
    }


_Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class OpTime(BaseModel):
    """The measured time of an op in the cache."""

    seconds: _Number  # of the fastest repeat, forward and backward
    spread: _Number = 0.0  # see `Timing.spread`
    busy: _Number = 0.0  # fraction of the CPU time that other processes used meanwhile
    at: _Number = Field(default_factory=time.time)  # time of the measurement, seconds since 1970


class _TimesFile(BaseModel):
    format: Literal["op-times/2"]
    environment: dict[str, str]
    times: dict[str, OpTime]


class OpTimes:
    """A cache of op times. Measures new ops until `budget_s` seconds are used up, and then estimates times.

    Callers choose the keys, such as op, shapes and dtype. Each `timing_environment()` has one file. Concurrent writes
    are merged, and a damaged file is replaced. `rates` are (operations, bytes) per second of a device that isn't on
    this machine, for which nothing is measured or cached. `threads`: CPU threads of measurements; 0: unchanged.
    """

    def __init__(
        self,
        device: str = "cpu",
        budget_s: float = 30.0,
        folder: Path | None = None,
        rates: tuple[float, float] | None = None,
        threads: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._left_s = 0.0 if rates else budget_s
        self._environment = timing_environment(device, threads)
        digest = hashlib.sha256(json.dumps(self._environment, sort_keys=True).encode()).hexdigest()[:16]
        self.file = (folder or platformdirs.user_cache_path("manyhands") / "planner") / f"ops-{digest}.json"
        self.notes: list[str] = []  # messages about the files
        self.measured = 0  # number of ops that were timed
        self.estimated = 0  # number of ops that were estimated
        self.failed: dict[str, str] = {}  # by key, why an op could not run alone; its time is estimated
        self._fresh: dict[str, OpTime] = {}
        self._used: dict[str, OpTime] = {}
        self._others: OtherLoad | None = None
        self._seconds = {} if rates else self._read_file()
        self._rates = rates

    def seconds(
        self, key: str, make: Callable[[], Callable[[], object]], operations: float, moved_bytes: float
    ) -> float:
        """Returns the measured or estimated time of an op. `make` creates a function that runs forward and backward."""
        if key not in self._seconds or self._is_stale(key):
            if self._left_s > 0 and key not in self.failed:
                try:
                    self._seconds[key] = self._fresh[key] = self._measure(make)
                    self.measured += 1
                except Exception as error:  # noqa: BLE001 - outside its network an op may fail on random values
                    self.failed[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
            if key not in self._seconds:
                self.estimated += 1
                return self.estimate(operations, moved_bytes)
        self._used[key] = self._seconds[key]
        return self._seconds[key].seconds

    def cached(self, key: str) -> float | None:
        """Returns the cached seconds, even if measured on a busy machine, or None if `key` isn't cached."""
        return self._seconds[key].seconds if key in self._seconds else None

    def store(self, key: str, seconds: float) -> None:
        self._seconds[key] = self._fresh[key] = OpTime(seconds=seconds)

    @property
    def spread(self) -> float:
        """The mean relative variation of the times used so far, weighted by time."""
        whole_s = sum(one.seconds for one in self._used.values())
        return sum(one.seconds * one.spread for one in self._used.values()) / whole_s if whole_s else 0.0

    def busy_warnings(self) -> list[str]:
        """Returns a list with one warning if a time was measured on a busy machine, otherwise an empty list."""
        busy = max((one.busy for one in self._used.values()), default=0.0)
        text = (
            f"other programs used {busy:.0%} of the processors while ops were timed, so times may be too long; "
            "the next search on an idle machine times these ops again"
        )
        return [text] if busy > BUSY else []

    def _is_stale(self, key: str) -> bool:
        """Returns True if the time was measured on a busy machine that is no longer busy."""
        was_busy = key not in self._fresh and self._seconds[key].busy > BUSY
        return was_busy and self._left_s > 0 and self._other_load() <= BUSY

    def _other_load(self) -> float:
        self._others = self._others or OtherLoad()
        return self._others.share()

    def estimate(self, operations: float, moved_bytes: float) -> float:
        """Returns the roofline estimate in seconds: the longer of computing and of accessing memory."""
        if self._rates is None:
            self._rates = self._measured_rates()
        return max(operations / self._rates[0], moved_bytes / self._rates[1])

    def save(self) -> None:
        """Adds new measurements to the cache file, atomically."""
        if not self._fresh:
            return
        content = _TimesFile(format="op-times/2", environment=self._environment, times=self._read_file() | self._fresh)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with replaced_on_success(self.file) as part:
            part.write_text(json.dumps(content.model_dump(), indent=1, sort_keys=True), encoding="utf-8")
        self._fresh = {}

    def _read_file(self) -> dict[str, OpTime]:
        try:
            file = _TimesFile.model_validate(parse_json(read_bytes(self.file), infinite=True))
            if file.environment != self._environment:
                raise ValueError("measured in another environment")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            place = error.errors()[0]["loc"] if isinstance(error, ValidationError) else None
            why = error if place is None else f'"{place[1]}" has no time' if len(place) > 1 else "another format"
            self.notes.append(f"the cache of op times {self.file} can't be read ({why}); measuring ops again")
            return {}
        oldest = time.time() - MOST_DAYS * _DAY_S
        return {key: one for key, one in file.times.items() if one.at >= oldest}

    def _measure(self, make: Callable[[], Callable[[], object]]) -> OpTime:
        busy = self._other_load()
        began = time.perf_counter()
        run = make()
        run()
        wait_for_device(self._device)
        found = time_function(run, str(self._device), _REPEATS, _LONG_S, busy=busy > BUSY)
        self._left_s -= time.perf_counter() - began
        return OpTime(seconds=found.seconds, spread=found.spread, busy=self._other_load())

    def _measured_rates(self) -> tuple[float, float]:
        """Returns measured (operations, bytes) per second, or assumed ones if no op has been measured."""
        known = [self._seconds.get(key) for key in ("rate of a product", "rate of a copy")]
        if known[0] and known[1]:
            product_s, copy_s = known[0].seconds, known[1].seconds
        elif self.measured == 0:
            return _ASSUMED_RATES.get(self._device.type, _ASSUMED_RATES["others"])
        else:
            left, right = torch.ones(2, _MATRIX, _MATRIX, device=self._device)
            source = torch.ones(_COPIED_VALUES, device=self._device)
            product, copy = self._measure(lambda: lambda: left @ right), self._measure(lambda: source.clone)
            self._fresh |= {"rate of a product": product, "rate of a copy": copy}
            self._seconds |= self._fresh
            product_s, copy_s = product.seconds, copy.seconds
        return 2 * _MATRIX**3 / max(product_s, 1e-9), 8 * _COPIED_VALUES / max(copy_s, 1e-9)
