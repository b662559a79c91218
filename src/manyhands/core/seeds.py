"""Derives seeds from their purpose, so that checkpoints need no state of random number generators."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Scrambles 64 bits: SplitMix64's finalizer, Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Derives a seed of 63 bits for a purpose, such as (7, "order", epoch). It is the same on all machines."""
    state = mix(seed & _MASK)
    for part in parts:
        if isinstance(part, str):
            for byte in part.encode():
                state = mix(state ^ byte)
        else:
            state = mix(state ^ (part & _MASK))
    return state >> 1
