"""What a process of a run says of itself all the time, so that a hang can be told, and who it is that hangs."""

from pydantic import BaseModel, ConfigDict

# The variable that names the file for a worker's `Pulse`.
PULSE_FILE = "MANYHANDS_PULSE_FILE"
# A process says so often that it lives.
PULSE_S = 1.0
# A step that takes this much longer than three times the usual is a stall.
STALL_S, STALL = 30.0, 3.0


class Pulse(BaseModel):
    """Where a process is.

    Attributes:
        count: of its pulses; one that doesn't grow any more is a process that doesn't run.
        step: updates made.
        phase: what it is at: train, data, evaluate, save.
        still_s: since it last got on.
        usual_s: the median of its last updates; of the first, what the link is expected to need; 0 if unknown.
        calls: collectives that it has come to, of those that all processes take part in; -1 where that isn't known.
        moved_bytes: by all its connections, both ways; 0 where the system doesn't say.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    count: int
    step: int
    phase: str
    still_s: float
    usual_s: float
    calls: int = -1
    moved_bytes: int = 0


class Seen(Pulse):
    """A pulse, and what the agent of its machine sees from outside.

    Attributes:
        rank: whose it is.
        pid: of the process.
        quiet_s: since its last pulse.
        cpu_s: processor time that it has used.
        stopped: True where the system doesn't let it run: SIGSTOP, or a debugger.
    """

    rank: int
    pid: int
    quiet_s: float
    cpu_s: float
    stopped: bool

    @property
    def stood_s(self) -> float:
        """Seconds since it last got on, as far as anybody knows."""
        return self.still_s + self.quiet_s

    @property
    def limit_s(self) -> float:
        """How long that may be before it is a stall."""
        return STALL_S + STALL * self.usual_s
