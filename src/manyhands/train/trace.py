"""Traces a few updates with torch's profiler into trace.json, which Perfetto and chrome://tracing open."""

import base64
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule

from manyhands.core.files import write_atomic
from manyhands.core.phases import CLOCK, OTHER, PHASES
from manyhands.core.scratch import scratch
from manyhands.parallel.group.plain import gather_plain
from manyhands.train.feed import UpdateShare
from manyhands.train.trainer import Trainer, record_time

_WARM_UP = 5  # untraced updates before the traced ones
_MOST_RANKS = 16  # processes that are shown
_NUMBERS = 100  # process ids in the trace for each process and its devices
_KEPT = ("name", "ph", "ts", "dur", "tid", "cat", "id", "bp")


def trace(trainer: Trainer, epoch: Callable[[], Iterator[UpdateShare]]) -> None:
    """Traces run.trace_steps updates after some warm-up updates. `epoch` yields an epoch's updates. A collective."""
    steps, made = trainer.job.run.trace_steps, 0
    CLOCK.spans = []
    plan = schedule(wait=0, warmup=_WARM_UP, active=steps, repeat=1)
    with scratch("trace") as folder, profile(schedule=plan) as profiler:
        profiler.on_trace_ready = lambda _: profiler.export_chrome_trace(str(folder / "own.json"))
        while made < _WARM_UP + steps and not trainer.due.run_is_over():
            for update in epoch():
                trainer.updater(update, trainer.progress.step)
                trainer.count_update()
                profiler.step()
                made += 1
                if made == _WARM_UP:
                    CLOCK.take_seconds()
                if made == _WARM_UP + steps:
                    break
        CLOCK.start_phase(OTHER)
        record_time(trainer)
        profiler.stop()
        own = _read_process_events(folder / "own.json", trainer.world.rank) if trainer.world.rank < _MOST_RANKS else []
    packed = base64.b64encode(zlib.compress(json.dumps(own).encode())).decode()
    everybody = gather_plain(packed, trainer.world)
    if trainer.world.is_main:
        events = [event for one in everybody for event in json.loads(zlib.decompress(base64.b64decode(one)))]
        began_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
        moved = [{**event, "ts": event["ts"] - began_us} if "ts" in event else event for event in events]
        text = json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"})
        trainer.journal.write_file(lambda: write_atomic(trainer.folder.trace, text))
    CLOCK.take_seconds()  # the time of the profiler is not recorded


def _read_process_events(file: Path, rank: int) -> list[dict[str, Any]]:
    """Reads this process's trace events in Chrome's format, in microseconds since 1970. Adds phases as a thread."""
    if not file.is_file():
        return []  # training ended during the warm-up
    content = json.loads(file.read_bytes())
    base_us, first = int(content.get("baseTimeNanoseconds", 0)) / 1000, rank * _NUMBERS
    kept: list[dict[str, Any]] = []
    for event in content["traceEvents"]:
        if not isinstance(event.get("pid"), int):
            continue  # metadata of the profiler
        pid = first if event["pid"] == os.getpid() else first + 1 + event["pid"]
        plain = {key: event[key] for key in _KEPT if key in event} | {"pid": pid}
        if event["ph"] in "Xsf":
            kept.append({**plain, "ts": event["ts"] + base_us})
        elif event["ph"] == "M" and event["name"] == "thread_name":
            kept.append(_metadata_event("thread_name", event["args"]["name"], pid, event["tid"]))
    began_us = min((event["ts"] for event in kept if "ts" in event), default=0.0)
    for pid in sorted({event["pid"] for event in kept}):
        device = f", device {pid - first - 1}" if pid > first else ""
        kept.append(_metadata_event("process_name", f"rank {rank} on {platform.node()}{device}", pid))
    kept.append(_metadata_event("thread_name", "phases", first))
    since_1970_s = time.time() - time.perf_counter()
    for phase, begin_s, end_s in CLOCK.spans or ():
        begin_us, took_us = (begin_s + since_1970_s) * 1e6, (end_s - begin_s) * 1e6
        if begin_us >= began_us:
            kept.append({"name": PHASES[phase], "ph": "X", "pid": first, "tid": 0, "ts": begin_us, "dur": took_us})
    return kept


def _metadata_event(kind: str, name: str, pid: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}
