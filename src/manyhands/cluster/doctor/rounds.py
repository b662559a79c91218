"""Who measures with whom at the same time, so that no machine takes part in two measurements at once."""

from collections.abc import Sequence


def rounds(hosts: Sequence[str], most: int = 0) -> list[list[tuple[str, str]]]:
    """A tournament of each pair (sender, receiver), in `most` rounds (0: all) of disjoint pairs."""
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, played = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        if 0 < most <= len(played):
            break
        pairs = [
            (one, two)
            for one, two in zip(seats[:half], reversed(seats[half:]), strict=True)
            if one is not None and two is not None
        ]
        played += [pairs, [(two, one) for one, two in pairs]] if pairs else []
        seats = [seats[0], seats[-1], *seats[1:-1]]  # one stays, the others move on
    return played[:most] if most else played
