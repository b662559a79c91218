"""How far a run is, as text: the live line of a terminal and the plain lines of a log."""

from collections import deque
from dataclasses import dataclass, field

from rich.text import Text

from manyhands.core.quantities import percentage
from manyhands.core.records import EvaluationMetrics, Event, StepMetrics
from manyhands.report.read import STARTS
from manyhands.report.words import (
    FEW_CLASSES,
    ago,
    custom_metrics,
    duration,
    epoch_name,
    number,
    percent,
    place,
    rate,
    top5,
)

# Speed is taken over this long, so that the time left neither jumps nor lags.
_WINDOW_S = 120.0
# Without a record for so long, the line says how old its news are.
_SILENT_S = 20.0
_BAR_MIN, _BAR_MAX = 8, 24


@dataclass
class ScreenProgress:
    """What is known while a run goes on."""

    last: StepMetrics | None = None  # the newest step record
    saved: float | None = None  # when the newest checkpoint was committed
    heard: float | None = None  # when the newest record came
    # (time, step) of the last minutes, for the time left
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def take(self, record: StepMetrics | EvaluationMetrics | Event) -> None:
        self.heard = record.time
        if isinstance(record, StepMetrics):
            if self.last and record.saved_step > self.last.saved_step:
                self.saved = max(self.saved or 0.0, record.time)
            if self.last and record.step <= self.last.step:
                self.recent.clear()
            self.last = record
            self.recent.append((record.time, record.step))
            while len(self.recent) > 2 and record.time - self.recent[0][0] > _WINDOW_S:
                self.recent.popleft()
        elif isinstance(record, Event) and record.kind == "saved":
            self.saved = record.time
        elif isinstance(record, Event) and record.kind in STARTS:
            self.recent.clear()

    def left_s(self, now: float) -> float | None:
        """Seconds to the end at the speed of the last minutes, evaluations included; None at first."""
        if self.last is None or len(self.recent) < 2:
            return None
        (start, first), (end, newest) = self.recent[0], self.recent[-1]
        if end <= start or newest <= first:
            return None
        left = (self.last.total_steps - newest) * (end - start) / (newest - first)
        return max(0.0, left - max(0.0, now - end))


def live_line(progress: ScreenProgress, now: float, width: int, *, ascii_only: bool = False) -> Text:
    """One line of at most `width` columns; what matters least is left out first."""
    step = progress.last
    if step is None:
        begin = Text("starting ..." if ascii_only else "starting …", "dim")
        begin.truncate(width)
        return begin
    epoch, done = place(step)
    epochs = max(epoch, -(-step.total_steps // step.steps_per_epoch))
    share = done / step.steps_per_epoch
    head, shown = f"epoch {epoch}/{epochs} ", f" {percentage(share, 0):>3}%"
    fields = _fit(_fields(progress, now), width - len(head) - len(shown) - _BAR_MIN)
    text = Text("".join(f"  {words}" for words, _ in fields))
    bar = max(0, min(_BAR_MAX, width - len(head) - len(shown) - len(text)))
    line = Text(head, "bold") + _bar(share, bar, ascii_only) + Text(shown) + text
    line.truncate(width)
    return line


def _fields(progress: ScreenProgress, now: float) -> list[tuple[str, int]]:
    """The words behind the bar in their order, each with its importance (0 goes last)."""
    step = progress.last
    assert step is not None
    fields = [(f"loss {number(step.loss)}", 0), (f"acc {percent(step.top1)}", 1)]
    silent = now - (progress.heard or now)
    if silent > _SILENT_S:
        fields.append((f"last record {ago(silent)}", 3))
    else:
        fields.append((f"{rate(step.images_per_s)} img/s", 3))
    left = progress.left_s(now)
    if left is not None:
        fields.append((f"left {duration(left)}", 2))
    if step.data_share >= 0.1 and silent <= _SILENT_S:
        fields.append((f"data {step.data_share:.0%}", 5))
    if progress.saved is not None:
        fields.append((f"saved {ago(now - progress.saved)}", 4))
    return fields


def _fit(fields: list[tuple[str, int]], room: int) -> list[tuple[str, int]]:
    while fields and sum(len(words) + 2 for words, _ in fields) > room:
        fields.remove(max(fields, key=lambda entry: entry[1]))
    return fields


def _bar(share: float, width: int, ascii_only: bool) -> Text:
    full, half, rest = ("#", "", "-") if ascii_only else ("━", "╸", "─")
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    done = full * (halves // 2) + (half if halves % 2 else "")
    return Text(done, "cyan") + Text(rest * (width - len(done)), "dim")


def step_line(progress: ScreenProgress) -> str:
    """The newest step for a log: words of the form key=value."""
    step = progress.last
    assert step is not None
    epoch, done = place(step)
    return (
        f"epoch={epoch} step={done}/{step.steps_per_epoch} loss={step.loss:.3f} acc={percentage(step.top1)} "
        f"img_s={rate(step.images_per_s)} data_pct={100 * step.data_share:.0f}"
    )


def evaluation_line(record: EvaluationMetrics, last: StepMetrics | None) -> str:
    """An evaluation for people, kept on the screen; with the epoch's training loss where it ends an epoch."""
    name = epoch_name(record.step, record.epoch, last.steps_per_epoch if last else 0)
    best = ", best" if record.best else ""
    trained = f", train loss {number(last.epoch_loss or 0.0)}" if last and _ends_epoch(last, record.step) else ""
    fifth = top5(record.top5, record.classes, ", top-5 {}")
    own = custom_metrics(record.metrics, ", {} {}")
    return f"epoch {name}: top-1 {percent(record.top1)}{fifth}, loss {number(record.loss)}{own}{trained}{best}"


def _ends_epoch(last: StepMetrics, step: int) -> bool:
    return last.epoch_loss is not None and last.step == step


def epoch_line(last: StepMetrics) -> str:
    """An epoch's training loss, where no evaluation tells it."""
    loss, top1 = number(last.epoch_loss or 0.0), percent(last.epoch_top1 or 0.0)
    return f"epoch {last.epoch}: train loss {loss}, train top-1 {top1}"


def epoch_log(last: StepMetrics) -> str:
    return f"epoch={last.epoch} train_loss={last.epoch_loss:.3f} train_top1={percentage(last.epoch_top1 or 0, 2)}"


def evaluation_log(record: EvaluationMetrics, last: StepMetrics | None) -> str:
    """An evaluation for a log."""
    name = epoch_name(record.step, record.epoch, last.steps_per_epoch if last else 0)
    trained = f" train_loss={last.epoch_loss:.3f}" if last and _ends_epoch(last, record.step) else ""
    fifth = "" if 0 < record.classes <= FEW_CLASSES else f"top5={percentage(record.top5, 2)} "
    return (
        f"epoch={name} evaluated={record.count} top1={percentage(record.top1, 2)} {fifth}"
        f"val_loss={record.loss:.3f}{custom_metrics(record.metrics, ' {}={}')}{trained}"
        + (" best" if record.best else "")
    )
