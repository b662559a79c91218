"""The status round, heartbeats, and monitors of slow ranks, stalls, communication, divergence, non-finite values.

In a status round, about every half second (run.log_every_s), a small all-reduce sums measurements and requests to save
or stop. Therefore, a signal on one process stops all processes at the same step, and the records cover all processes.
"""

import contextlib
import math
import os
import shlex
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from manyhands.core.errors import RunError
from manyhands.core.phases import CLOCK, COMMUNICATION, COMPUTE, RECORDS
from manyhands.core.run_folder import resume_command
from manyhands.core.timeouts import HEARTBEAT_S, STALL_FACTOR, STALL_S
from manyhands.core.world import World
from manyhands.parallel.group.heartbeat import HEARTBEAT_FILE, Heartbeat, stop_waiting_path
from manyhands.parallel.group.listeners import is_listening, tcp_sockets
from manyhands.parallel.group.plain import gather_plain
from manyhands.parallel.network import MicroBatch, ParallelNetwork
from manyhands.parallel.replicas.norm_pass import precise_dtype
from manyhands.parallel.replicas.shared_memory import SharedSums
from manyhands.sync.choose import EXACT, choose_method, cost_label
from manyhands.sync.costs import Cost, LinkCase
from manyhands.sync.synchronizer import Synchronizer
from manyhands.train.feed import StepSums
from manyhands.train.journal import Journal, RunContext

MOST_STEPS = 1000
LONGEST_S = 10.0  # longest interval on a slow link, because stop requests wait for a round
REPORT_S, REPORT_SHARE = 30.0, 1 / 20  # seconds between records of phases; in long runs, this fraction of the time


@dataclass
class StatusSums:
    """Measurements and requests of one process since the last status round, or their sums over all processes."""

    loss_sum: float  # sum of the samples' losses; NaN after a non-finite loss or gradient
    correct: float  # samples predicted correctly
    samples: float
    stop: float  # processes that were asked to stop
    save: float  # above 0 if a checkpoint is due
    written: float  # processes that have written their part of the save in progress
    report_time: float  # above 0 if the seconds by phase must be recorded
    elapsed_s: float
    replaced: float  # pictures replaced because they couldn't be read
    extra: list[float]  # further numbers of the monitor; empty without one

    @property
    def loss(self) -> float:
        """The mean loss. 0 if there are no samples, and NaN if a loss or gradient wasn't finite."""
        return self.loss_sum / max(1, self.samples)

    @property
    def top1(self) -> float:
        """The fraction of samples predicted correctly, or 0 if there are no samples."""
        return self.correct / max(1, self.samples)


@dataclass
class Status(StatusSums):
    """The result of a status round: the sums over all processes."""

    own: StatusSums  # measurements of this process
    seconds: float  # since the last round, by this process's clock
    data_share: float  # fraction of that time that this process waited for data
    waited_s: float  # time that this process waited in the round


class StatusRound:
    """Runs status rounds and determines, the same on every process, when the next round is due.

    `every_s`: seconds between rounds. `save_every_s`: seconds between checkpoints. `multiple`: rounds are at
    multiples of this number of steps, between exchanges over a slow link, or after LONGEST_S seconds.
    """

    def __init__(self, world: World, every_s: float, save_every_s: float, multiple: int = 1) -> None:
        self._world, self._every_s, self.save_every_s = world, every_s, save_every_s
        self.multiple = multiple
        self._last = self.saved_s = self._reported = self._began = time.perf_counter()  # saved_s: time of the last save
        self.next_step, self._last_step = 0, 0  # the step of the next round, unless one is due for another reason
        self.waiting_s = 0.0

    def exclude_time(self, seconds: float) -> None:
        """Excludes the seconds of an evaluation or a save from the training time. Measurements stay."""
        self._last += seconds

    def reset(self, step: int) -> None:
        """Restarts the clock and the count of steps, as at the end of a round."""
        self._last, self._last_step, self.waiting_s = time.perf_counter(), step, 0.0

    def sum_measurements(
        self,
        measured: StepSums,
        step: int,
        *,
        stop: bool,
        written: bool = False,
        extra: Callable[[float, int, float], list[float]] | None = None,
        replaced_pictures: int = 0,
    ) -> Status:
        """Runs a status round: sums measurements and requests over all processes. A collective.

        `written`: True if this process has finished writing the save in progress. `extra`: returns more numbers to sum,
        given the seconds, steps and seconds of waiting for data since the last round. `replaced_pictures`: how many.
        """
        now = time.perf_counter()
        took_s, steps = now - self._last, step - self._last_step
        more = extra(took_s, steps, self.waiting_s) if extra else []
        if self._world.device != "cpu":
            CLOCK.start_phase(COMPUTE)  # an accelerator must finish its updates first
        sums = measured.take_sums()
        CLOCK.start_phase(RECORDS)
        save = self._world.is_main and now - self.saved_s > self.save_every_s
        report_every_s = max(REPORT_S, REPORT_SHARE * (now - self._began))
        report_time = self._world.is_main and now - self._reported > report_every_s
        own = StatusSums(*sums, stop, save, written, report_time, took_s, replaced_pictures, more)
        *numbers, _ = vars(own).values()
        device = self._world.device
        vector = torch.tensor([*map(float, numbers), *more], dtype=precise_dtype(device), device=device)
        began_s, before = time.perf_counter(), CLOCK.start_phase(COMMUNICATION)
        if not self._world.alone:
            dist.all_reduce(vector)
        added = vector.tolist()
        total = StatusSums(*added[: len(numbers)], extra=added[len(numbers) :])
        CLOCK.start_phase(before)
        waited_s = time.perf_counter() - began_s
        self._reported = now if total.report_time else self._reported
        mean_s = max(total.elapsed_s / self._world.size / max(1, steps), 1e-6)
        wanted = step + min(MOST_STEPS, max(1, round(self._every_s / mean_s)))
        free = -(-wanted // self.multiple) * self.multiple
        self.next_step = min(free, max(wanted, step + round(LONGEST_S / mean_s)))
        seconds = max(took_s, 1e-9)
        data_share = min(1.0, self.waiting_s / seconds)
        status = Status(**vars(total), own=own, seconds=seconds, data_share=data_share, waited_s=waited_s)
        self.reset(step)
        return status


_SLOW, _TIMES = 1.3, 3  # a slow rank's multiple of the median of other ranks, in so many rounds in a row


@dataclass
class SpeedMonitor:
    """Compares the speeds of processes, reports slow ranks and stalls, and adapts `sync.every` and `sync.delay`."""

    synchronizer: Synchronizer  # measures how long this process waits
    cost: Cost  # the method, with its pace
    world: World
    hosts: list[str]  # name of each rank's machine
    _waited_s: float = field(default=0.0, init=False)
    _slow: list[int] = field(default_factory=list[int], init=False)
    _reported: set[int] = field(default_factory=set[int], init=False)
    _stood_s: float = field(default=0.0, init=False)
    _stalls_s: list[float] = field(default_factory=list[float], init=False)

    def numbers_to_sum(self, seconds: float, steps: int, _waiting_s: float) -> list[float]:
        """Returns numbers to sum over processes: seconds per step, by rank, then seconds of an exchange, by rank."""
        waited_s = self.synchronizer.waited_s
        self._stood_s, self._waited_s = waited_s - self._waited_s, waited_s
        step_s = (seconds - self._stood_s) / max(1, steps)
        own = [rank == self.world.rank for rank in range(self.world.size)]
        return [*(step_s * one for one in own), *(self.synchronizer.exchange_s * one for one in own)]

    def observe(self, status: Status, step: int, journal: Journal) -> Cost | None:
        """Reports stalls and slow ranks. Returns the sync method if `every` or `delay` changed, else None."""
        speeds_s, exchanges_s = status.extra[: self.world.size], status.extra[self.world.size :]
        self._report_stall(status.waited_s, step, journal)
        self._report_slow_rank(speeds_s, step, journal)
        before, now = self.cost, self.synchronizer.adapt_pace(speeds_s, exchanges_s)
        if now is not None:
            self.cost = now
            speed = "take longer" if (now.every, now.delay) > (before.every, before.delay) else "are faster"
            every, delay = f"{now.every} steps (was {before.every})", f"{now.delay} steps (was {before.delay})"
            message = f"exchanges {speed} than before; sync.every is now {every}, sync.delay {delay}"
            journal.event("sync", message, step, every=now.every, delay=now.delay, method=now.method)
        return now

    def _report_stall(self, waited_s: float, step: int, journal: Journal) -> None:
        """Reports an unusually long wait. `waited_s`: the seconds that this process waited in the status round."""
        stood_s = self._stood_s + waited_s
        # The first wait depends on how unequally the processes started.
        usual_s = statistics.median(self._stalls_s) if self._stalls_s else stood_s
        self._stalls_s = [*self._stalls_s[-4:], stood_s]
        if message := stall_message(stood_s, usual_s, remote=len({*self.hosts}) > 1):
            journal.event("stall", message, step, seconds=stood_s)

    def _report_slow_rank(self, speeds: list[float], step: int, journal: Journal) -> None:
        slowest = max(range(len(speeds)), key=speeds.__getitem__)
        usual_s = statistics.median([*speeds[:slowest], *speeds[slowest + 1 :]])
        if not math.isfinite(usual_s) or speeds[slowest] <= _SLOW * usual_s:
            self._slow.clear()
            return
        self._slow.append(slowest)
        if len(self._slow) >= _TIMES and set(self._slow[-_TIMES:]) == {slowest} and slowest not in self._reported:
            self._reported.add(slowest)
            message = (
                f"rank {slowest} on {self.hosts[slowest]} takes {speeds[slowest]:.3g} s a step, the other ranks "
                f"{usual_s:.3g} s, so the other ranks are idle {1 - usual_s / speeds[slowest]:.0%} of the time"
            )
            journal.event("slow", message, step, rank=slowest)


# Communication is reported above this fraction of time, after so many steps or seconds; the first step doesn't count.
_LONG, _FEW_STEPS, _LONG_S = 1 / 3, 3, 5.0
_BACKWARD = 0.5  # fraction of computing in which gradients are ready: most of the backward pass


@dataclass
class CommunicationMonitor:
    """Measures the time that processes wait for each other if gradients are averaged in every update.

    On a CPU, waiting is the time in which the training thread uses no CPU. On accelerators, which compute
    asynchronously, waiting is the time beyond `compute_s`, the seconds of an update without communication.
    """

    # measures the link; takes the seconds of computing per step, and returns the inputs of the cost model; a collective
    link_case: Callable[[float], LinkCase]
    run: RunContext
    ruled_out: dict[str, str]  # methods that the job rules out, and why
    compute_s: float = 0.0  # seconds of computing per step on accelerators; 0 on a CPU
    _own_s: float = field(default_factory=time.thread_time, init=False)
    _stood_s: float = field(default=0.0, init=False)
    _all_s: float = field(default=0.0, init=False)
    _first: int = field(default=-1, init=False)
    _reported: bool = field(default=False, init=False)

    def numbers_to_sum(self, seconds: float, steps: int, waiting_s: float) -> list[float]:
        """Returns three numbers to sum over processes: seconds of waiting for others, seconds, and 1 (to count)."""
        before, self._own_s = self._own_s, time.thread_time()
        busy_s = self.compute_s * steps if self.compute_s else self._own_s - before
        return [max(0.0, seconds - busy_s - waiting_s), seconds, 1.0]

    def observe(self, status: Status, step: int, journal: Journal) -> None:
        """Reports once if communication takes a large fraction of the time. The report is a collective."""
        if self._first < 0:
            self._first = step
            return
        stood_s, all_s, processes = status.extra
        self._stood_s, self._all_s = self._stood_s + stood_s, self._all_s + all_s
        steps = step - self._first
        if self._reported or (steps < _FEW_STEPS and self._all_s < _LONG_S * processes):
            return
        share = self._stood_s / max(self._all_s, 1e-9)
        if share > _LONG:
            self._reported = True
            step_s = self._all_s / processes / steps
            journal.event("sync", self._sync_message(share, step_s), step, share=share, step_s=step_s)

    def _sync_message(self, share: float, step_s: float) -> str:
        computing_s = (1 - share) * step_s
        case = self.link_case(computing_s)
        case = replace(case, backward_s=_BACKWARD * computing_s)
        choice = choose_method(case, self.run.job.sync, without=self.ruled_out)
        chosen = choice.chosen
        message = f"communication between machines takes {share:.0%} of the {step_s:.3g} s per step"
        if chosen.method == EXACT:
            return f"{message}; --sync auto would also choose {EXACT}: {choice.reason}"
        folder = self.run.folder.path
        resume = resume_command(folder, "--set sync.method=auto", 'sync__method="auto"')
        change = f"manyhands stop {shlex.quote(str(folder))}, then {resume}"
        return f"{message}; --sync auto would take about {chosen.step_s:.3g} s ({cost_label(chosen)}): {change}"


# A reported stall takes at least so many seconds, and so many times the usual update.
_REPORTED_S, _REPORTED_TIMES = 3.0, 3.0
_KEPT, _ENOUGH = 20, 3
_ACKED_AT, _INFO_BYTES = 120, 136  # in Linux's struct tcp_info: offset of tcpi_bytes_acked, end of tcpi_bytes_received
_STILL_S = 2.0  # heartbeats have the expensive fields only if progress is older
_MOVES_BYTES, _BUSY_S = 8192, 0.3  # per second: above keep-alive messages, and above the CPU time of waiting


class HeartbeatWriter:
    """Tracks the progress of this process and writes heartbeats."""

    def __init__(self) -> None:
        self.expected_s, self.phase = 0.0, "train"  # seconds of the first update (0: unknown); the current activity
        self.linked = False  # this process communicates with other machines
        self._updates_s: deque[float] = deque(maxlen=_KEPT)
        self._at, self._step, self._waiting = time.monotonic(), 0, False

    def record_progress(self, *, waiting: bool = False) -> None:
        """Records that this process made progress. `waiting`: True if it waits for data next."""
        self._at, self._waiting = time.monotonic(), waiting

    def record_update(self, step: int) -> str:
        """Records an update that began at the last `record_progress`. Returns a message if it was slow, else ""."""
        took_s, self._step = time.monotonic() - self._at, step
        message = self.stall_warning(took_s)
        # One stall must not change the usual time.
        self._updates_s.append(min(took_s, _REPORTED_TIMES * max(self._usual_s(), _REPORTED_S)) if message else took_s)
        self.record_progress()
        return message

    def stall_warning(self, took_s: float) -> str:
        known = len(self._updates_s) >= _ENOUGH
        return stall_message(took_s, self._usual_s(), remote=self.linked) if known and took_s > _REPORTED_S else ""

    def hang_reason(self) -> str:
        """Returns a sentence if this process seems to hang, else "". May take a second."""
        stood_s, usual_s = time.monotonic() - self._at, self._usual_s() or self.expected_s
        if stood_s <= STALL_S + STALL_FACTOR * usual_s:
            return ""
        before, spent = count_network_bytes(), time.process_time()
        time.sleep(HEARTBEAT_S)
        if count_network_bytes() - before > _MOVES_BYTES or time.process_time() - spent > _BUSY_S:
            return ""
        return f"this process has been waiting for {stood_s:.0f} s without progress"

    def write_in_background(self) -> contextlib.AbstractContextManager[None]:
        """Writes heartbeats within the context, for the agent that started this process, if there is one."""
        path = os.environ.get(HEARTBEAT_FILE)
        if not path:
            return contextlib.nullcontext()
        over = threading.Event()
        self.record_progress()
        return in_background(over, lambda: self._write_heartbeats(Path(path), over))

    def heartbeat(self, count: int = 0) -> Heartbeat:
        """Returns heartbeat number `count`. Sets expensive fields only after `_STILL_S` seconds without progress."""
        still_s = time.monotonic() - self._at
        known = still_s > _STILL_S
        return Heartbeat(
            count=count,
            step=self._step,
            phase="data" if self._waiting else self.phase,
            still_s=still_s,
            usual_s=self._usual_s() or self.expected_s,
            calls=count_collectives() if known else -1,
            moved_bytes=count_network_bytes() if known else 0,
            cpu_s=time.process_time(),
        )

    def _usual_s(self) -> float:
        return statistics.median(self._updates_s) if self._updates_s else 0.0

    def _write_heartbeats(self, path: Path, over: threading.Event) -> None:
        count, temporary = 0, path.with_suffix(".new")
        while not over.wait(HEARTBEAT_S):
            count += 1
            heartbeat = self.heartbeat(count)
            with contextlib.suppress(OSError):  # a full disk; the agent checks separately that this process runs
                temporary.write_text(heartbeat.model_dump_json(), encoding="utf-8")
                temporary.replace(path)
            if stop_waiting_path(path.parent).exists():
                shut_connections()
                return


@contextlib.contextmanager
def in_background(over: threading.Event, *targets: Callable[[], object]) -> Generator[None]:
    """Runs each function in a thread within the context. Then sets `over`, and waits briefly for the threads."""
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(HEARTBEAT_S)


def shut_connections() -> None:
    """Shuts down all connections of this process, so that gloo fails at once instead of waiting for lost peers."""
    for _, connection in tcp_sockets():
        with contextlib.suppress(OSError):
            if not is_listening(connection):
                connection.shutdown(socket.SHUT_RDWR)


def stall_message(took_s: float, usual_s: float, *, remote: bool = True) -> str:
    """Returns a message if `took_s` is much longer than `usual_s`, else "". `remote`: other machines take part."""
    if took_s <= max(_REPORTED_S, _REPORTED_TIMES * usual_s):
        return ""
    waited = "the network or another process" if remote else "another process"
    return f"training stalled for {took_s:.3g} s, waiting for {waited} (usual: {usual_s:.2g} s)"


def count_collectives() -> int:
    """Returns the number of collectives over all processes that this process started, or -1 without a process group."""
    if not dist.is_initialized():
        return -1
    size = dist.get_world_size()
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return SharedSums.begun + sum(group._get_sequence_number_for_group() for group in groups if group.size() == size)


def count_network_bytes() -> int:
    """Returns the bytes that this process has received and sent (if acknowledged) over TCP, or 0 if unknown."""
    total = 0
    for _, connection in tcp_sockets():
        with contextlib.suppress(OSError, AttributeError):
            found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(found) >= _INFO_BYTES:
                total += sum(struct.unpack_from("=QQ", found, _ACKED_AT))
    return total


_DIVERGED, _ROUNDS = 3.0, 3  # multiple of the first loss, for so many rounds in a row: a high rate may raise it once


@dataclass
class DivergenceDetector:
    """Detects losses far above the first loss and far above the loss of random guesses."""

    classes: int
    _began: float = math.nan
    _high: int = 0
    _reported: bool = False

    def observe(self, loss: float) -> str:
        """Returns a warning, only once, if the loss stays far too high. Otherwise returns ""."""
        if math.isnan(self._began):
            self._began = loss
        # A resumed run begins with a small loss, which may triple without divergence.
        limit = _DIVERGED * max(self._began, math.log(max(2, self.classes)))
        self._high = self._high + 1 if loss > limit else 0
        if self._high < _ROUNDS or self._reported:
            return ""
        self._reported = True
        return f"training diverges: the loss rose from {self._began:.4g} to {loss:.4g} (do: {ADVICE})"


_SHOWN = 8  # samples named in a message
ADVICE = "reduce train.lr, set train.warmup_epochs = 1, or set train.clip = 1.0"
HINTS = (ADVICE, "with fp16, use bf16 or fp32 instead")
FIRST_HINTS = ("no update was possible: check the network, its weights, the inputs and the loss function", HINTS[1])
INPUT_HINTS = ("check these samples (counted from 0 in the training split) and the code that prepares samples",)


def explain_loss(
    network: ParallelNetwork, part: MicroBatch, world: World, step: int, *, closely: bool = True
) -> RunError:
    """Returns the error for a non-finite loss on this process. With `closely`, finds the first non-finite tensor.

    Not a collective, so a network whose forward pass needs other processes isn't searched.
    """
    images, samples = part.inputs, part.samples
    assert samples is not None
    finite = is_finite(images)
    if not finite and len(images) == len(samples):
        samples = samples[~torch.isfinite(images).reshape(len(images), -1).all(1).cpu()]
    some = ", ".join(map(str, samples[:_SHOWN].tolist())) + (" …" if len(samples) > _SHOWN else "")
    where = f"rank {world.rank}, step {step}, samples {some}"
    if not finite:
        what = "the loss is not finite, because the input pictures contain NaN or infinity"
        return RunError(what, where, INPUT_HINTS)
    found = f": {_nonfinite(network.model, images)}" if closely and not network.share.collective_forward else ""
    return RunError(f"the loss is not finite{found}", where, HINTS if step else FIRST_HINTS)


def _nonfinite(model: nn.Module, images: Tensor) -> str:
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"parameter {name} is {value_kind(parameter)}"
    found, names = list[str](), {module: name or "the network" for name, module in model.named_modules()}

    def check_output(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and module in names and not found and not is_finite(output):
            found.append(f"the output of {names[module]} is {value_kind(output)}")

    hook = register_module_forward_hook(check_output)
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train()
        hook.remove()
    return found[0] if found else "all outputs are finite, so the loss function is the cause"


def explain_nonfinite(network: ParallelNetwork, world: World, measured: StepSums) -> RunError:
    """Returns the error for a non-finite value that a status round or a save found. A collective."""
    mine = [float(measured.bad_loss_step), float(measured.bad_gradient_step)]
    by_rank: list[list[float]] = gather_plain(mine, world)
    step = min(map(min, by_rank))
    endless = network.traits.nonfinite_buffers
    named = [(f"parameter {name}", one) for name, one in network.model.named_parameters()]
    named += [(f"buffer {name}", one) for name, one in network.model.named_buffers() if name not in endless]
    lost = next((name for name, one in named if not is_finite(one)), "")
    hints = (*HINTS, "resume from the last checkpoint, which was saved before this error")
    if not math.isfinite(step):
        what = f"{lost or 'a part of the network'} is not finite, although every loss was finite"
        return RunError(what, "an update", hints)
    # A non-finite loss makes the gradients of the same step non-finite, on all processes.
    kind = 0 if any(bad == step for bad, _ in by_rank) else 1
    rank = next(rank for rank, seen in enumerate(by_rank) if seen[kind] == step)
    what = f"{('the loss', 'a gradient')[kind]} is not finite" + (f", and {lost} is not finite either" if lost else "")
    return RunError(what, f"rank {rank}, step {step:.0f}", hints if step else FIRST_HINTS)


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


def value_kind(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"
