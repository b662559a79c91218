"""Says once, while training, that agreeing between machines takes long, and what another method would make of it."""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyhands.core.resuming import resume_command
from manyhands.sync.choose import EXACT, choose, words_of
from manyhands.sync.costs import LinkCase
from manyhands.sync.options import SyncOptions
from manyhands.train.journal import Journal

# Less than this share of the time isn't worth a line.
_LONG = 1 / 3
# The first step starts everything; what follows must be a few steps, or long ones.
_FEW_STEPS, _LONG_S = 3, 5.0
# The part of computing in which gradients are ready to be sent: most of the backward pass.
_BACKWARD = 0.5


@dataclass
class CommunicationMonitor:
    """Watches how long processes stand still for each other where the mode agrees in every update.

    On a CPU the thread that trains computes whenever it doesn't wait, so that its processor time tells. Accelerators
    compute beside it; there an update without agreement has been timed before.
    """

    # measures the link and says what decides the costs of agreeing, for a step that computes for so many seconds;
    # a collective
    case: Callable[[float], LinkCase]
    options: SyncOptions  # of the sync methods
    without: dict[str, str]  # methods that the job rules out, and why
    compute_s: float = 0.0  # of a step, on accelerators; 0 on a CPU
    # seconds since the last agreement that weren't waited for others
    waited_for_data_s: Callable[[], float] = lambda: 0.0
    run: str = "RUN"  # the run folder
    _own_s: float = field(default_factory=time.thread_time, init=False)
    _stood_s: float = field(default=0.0, init=False)
    _all_s: float = field(default=0.0, init=False)
    _first: int = field(default=-1, init=False)
    _reported: bool = field(default=False, init=False)

    def mine(self, seconds: float, steps: int) -> list[float]:
        """Numbers to be added up over all processes: seconds that this one stood still, and all seconds.

        Args:
            seconds: since the last agreement.
            steps: made in that time.
        """
        before, self._own_s = self._own_s, time.thread_time()
        busy_s = self.compute_s * steps if self.compute_s else self._own_s - before
        return [max(0.0, seconds - busy_s - self.waited_for_data_s()), seconds]

    def observe(self, values: list[float], step: int, processes: int, journal: Journal) -> None:
        """Says so where the sums of `mine` show it, alike on all processes; a collective where they do."""
        if self._first < 0:
            self._first = step
            return
        self._stood_s, self._all_s = self._stood_s + values[0], self._all_s + values[1]
        steps = step - self._first
        if self._reported or (steps < _FEW_STEPS and self._all_s < _LONG_S * processes):
            return
        share = self._stood_s / max(self._all_s, 1e-9)
        if share > _LONG:
            self._reported = True
            step_s = self._all_s / processes / steps
            journal.event("sync", self._line(share, step_s), step, share=share, step_s=step_s)

    def _line(self, share: float, step_s: float) -> str:
        computing_s = (1 - share) * step_s
        case = self.case(computing_s)
        choice = choose(replace(case, backward_s=_BACKWARD * computing_s), self.options, without=self.without)
        chosen = choice.chosen
        said = f"communication between machines takes {share:.0%} of a step's {step_s:.3g} s"
        if chosen.method == EXACT:
            return f"{said}; --sync auto would also choose {EXACT}: {choice.reason}"
        resume = resume_command(Path(self.run), "--set sync.method=auto", 'sync__method="auto"')
        change = f"manyhands stop {shlex.quote(self.run)}, then {resume}"
        return f"{said}; --sync auto needs about {chosen.step_s:.3g} s ({words_of(chosen)}): {change}"
