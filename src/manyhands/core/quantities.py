"""Parses memory sizes and link speeds, such as 14GiB and 1gbit, and formats percentages and durations."""

import re

from manyhands.core.errors import UserError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z/]*)", re.ASCII)
_PREFIXES = ("", "k", "m", "g", "t")
_BYTES = {
    f"{prefix}{word}": base**power
    for word, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate(_PREFIXES)
    if prefix or word == "b"
}
_BITS = {f"{prefix}bit": 1000**power / 8 for power, prefix in enumerate(_PREFIXES)}


def percentage(share: float, digits: int = 1) -> str:
    """Formats a fraction in percent, without "%". Values below 1 are never rounded up to 100: 0.9996 is 99.9."""
    value = round(100 * share, digits)
    return f"{value if share >= 1 else min(value, 100 - 10**-digits):.{digits}f}"


def parse_memory(text: str, where: str = "--memory") -> int:
    """Returns the bytes of "14GiB", "500 MB" or "1000000". Raises UserError if the text is not a positive amount."""
    number, unit = _number_and_unit(text)
    size = _BYTES.get(unit.lower() or "b")
    if number <= 0 or size is None:
        hints = ("write a number and a unit, such as 14GiB or 500MB",)
        raise UserError(f'"{text}" is not an amount of memory', where, hints)
    return int(number * size)


def parse_bandwidth(text: str, where: str = "--link") -> float:
    """Returns the bytes per second of "1gbit", "100 Mbit/s" or "8GB/s". Raises UserError for any other text."""
    number, unit = _number_and_unit(text)
    unit = unit.removesuffix("/s")
    size = _BITS.get(unit.lower().removesuffix("s")) or _BITS.get(unit.lower())
    # "8gb" is ambiguous, and the plan would be wrong by a factor of eight.
    if size is None and unit.endswith("B"):
        size = _BYTES.get(unit.lower())
    if number <= 0 or size is None:
        hints = "write bits or bytes per second, such as 1gbit, 100mbit or 8GB/s"
        raise UserError(f'"{text}" is not a link speed', where, (hints,))
    return number * size


def short_time(seconds: float) -> str:
    """Formats a duration with two or three digits: 0.45 ms, 750 ms, 1.03 s, 480 s."""
    milliseconds = seconds * 1e3
    if milliseconds < 9.95:
        return f"{milliseconds:.2g} ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 999.5 else f"{float(f'{seconds:.3g}'):,g} s"


def _number_and_unit(text: str) -> tuple[float, str]:
    text = text.strip()
    match = _NUMBER.fullmatch(text) if len(text) <= 40 else None  # limits the value to a float's range
    return (float(match[1]), match[2]) if match else (0.0, "")
