"""Whether fewer processes would do as well: data parallel on fewer of them, and one that does it all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from manyhands.core.quantities import short_time
from manyhands.planner.choose import DATA_PARALLEL, LEAST_GAIN, LEAST_PREDICTED_GAIN
from manyhands.planner.find import Option, SearchResult
from manyhands.planner.timing import Timing

ALONE = "one process"
# Each count up to this is looked at; of more processes, halves.
_FEW = 4


def fewer_counts(processes: int) -> list[int]:
    """The numbers of processes below this one that are looked at, ascending."""
    if processes <= _FEW:
        return list(range(1, processes))
    counts: list[int] = []
    while processes > 1:
        processes //= 2
        counts.append(processes)
    return counts[::-1]


def name_of(processes: int) -> str:
    return ALONE if processes == 1 else f"{DATA_PARALLEL} on {processes}"


def options_of(
    counts: Iterable[int], price: Callable[[int], Option], shares: Mapping[int, Timing] | None = None
) -> list[Option]:
    """Data parallel on fewer processes; `shares`: one process's update where so many share it, if it was timed."""
    found: list[Option] = []
    for count in counts:
        option = replace(price(count), name=name_of(count))
        if shares and count in shares:
            prediction = replace(option.prediction, compute_seconds=shares[count].seconds)
            option = replace(option, prediction=prediction)
        found.append(option)
    return found


def enough(found: SearchResult, fewer: Sequence[Option], seconds: float, spread: float) -> tuple[int, str]:
    """The fewest processes that do as well as the plan that was picked, and why; 0 where all are needed.

    Of several such numbers a larger one is taken where it is predicted to be clearly faster. `seconds` is an update's
    under the plan that was picked, `spread` the share by which what was timed varied; no number is recommended by less.
    """
    repeating = _without_repeats(found.chosen)
    if repeating < found.request.world_size:
        return repeating, f"{found.chosen.name} repeats all work on {found.request.world_size // repeating} processes"
    doing = [one for one in fewer if one.fits and _slowest(one, spread) <= seconds * LEAST_GAIN]
    if doing:
        limit = LEAST_PREDICTED_GAIN * min(_slowest(one, spread) for one in doing)
        option = min((one for one in doing if one.prediction.seconds <= limit), key=lambda one: one.mesh.size)
        least, whole = short_time(option.prediction.seconds), f"{found.pick.name} on {found.request.world_size}"
        return option.mesh.size, f"{option.name} takes {least} per step, while {whole} takes {short_time(seconds)}"
    return 0, ""


def _slowest(option: Option, spread: float) -> float:
    """Seconds of an update at the slow end of what was timed."""
    return option.prediction.seconds + spread * option.prediction.compute_seconds


def _without_repeats(option: Option) -> int:
    """Processes that are left where those that compute the same are one."""
    left = 1
    for axis, size in enumerate(option.mesh.sizes):
        if any(letters[axis] != "r" for letters in option.letters.values()):
            left *= size
    return left
