"""What each machine's one process does for the doctor, once it has joined all the others: adds up numbers with them."""

import torch
import torch.distributed as dist

from manyhands.core.world import World

# A ring that fits no single packet, and takes no time even on a slow link.
NUMBERS = 10_000


def check_sum(world: World) -> None:
    """Raises RuntimeError where the sum of all processes' numbers is wrong."""
    numbers = torch.full((NUMBERS,), float(world.rank + 1), device=world.device)
    if not world.alone:
        dist.all_reduce(numbers)
    expected = world.size * (world.size + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"the sum over all machines is wrong: {numbers[0].item()}, expected {expected}")
