"""Numbers and texts as people read them."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from manyhands.core.quantities import percentage
from manyhands.core.records import StepMetrics
from manyhands.core.terminal import plain

# Of so few classes five guesses miss none.
FEW_CLASSES = 5


def shorten(text: str, width: int) -> str:
    """Cuts the middle out of a text that is too long."""
    if len(text) <= width:
        return text
    head = (width - 1 + 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def duration(seconds: float) -> str:
    """Two units at most: 8s, 2m05s, 2h11m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def ago(seconds: float) -> str:
    """One unit, since it is only a reminder: 12s ago, 2m ago."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s ago"
    return f"{whole // 60}m ago" if whole < 3600 else f"{whole // 3600}h ago"


def percent(share: float) -> str:
    """A share of one: 46.2 %."""
    return f"{percentage(share)} %" if math.isfinite(share) else "?"


def top5(share: float, classes: int, form: str) -> str:
    """A top-5 share in a form such as "top-5 {}  "; nothing where five guesses are all, as `classes` says if known."""
    return form.format(percent(share)) if not 0 < classes <= FEW_CLASSES else ""


def custom_metrics(metrics: Mapping[str, float], form: str) -> str:
    """Figures of the user's own, each in a form such as ", {} {}" of its name and value."""
    return "".join(form.format(plain(name), number(value)) for name, value in metrics.items())


def number(value: float) -> str:
    """Four figures or so: 1840, 93.4, 2.310, 0.00012."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.3f}"
    if 10 <= abs(value) < 1000:
        return f"{value:.1f}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.2g}"


def rate(images_per_s: float) -> str:
    """Images per second without false precision."""
    if not math.isfinite(images_per_s):
        return "?"
    return f"{images_per_s:.0f}" if images_per_s >= 100 else f"{images_per_s:.3g}"


def moment(time: float) -> str:
    """A time as 2026-11-20T20:01:07Z, the same on every machine."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return "?"


def place(record: StepMetrics) -> tuple[int, int]:
    """The epoch that is under way, counted from 1, and the updates made in it."""
    if record.step_in_epoch == 0 and record.epoch > 0:
        return record.epoch, record.steps_per_epoch
    if record.step_in_epoch >= record.steps_per_epoch and record.step == record.epoch * record.steps_per_epoch:
        return record.epoch, record.steps_per_epoch
    return record.epoch + 1, min(record.step_in_epoch, record.steps_per_epoch)


def epoch_name(step: int, epoch: int, steps_per_epoch: int) -> str:
    """How far an evaluation was: 3, or 2.5 in the middle of one."""
    if steps_per_epoch <= 0 or step % steps_per_epoch == 0:
        return str(epoch)
    return f"{epoch + (step % steps_per_epoch) / steps_per_epoch:.1f}"
