"""What a network may take from training pictures before its first update."""

from torch import Tensor, nn

# So many small pictures have a million patches.
INITIALIZATION_SAMPLES = 1_000


class InitializedFromData(nn.Module):
    """A network that is shown pictures before it is trained; one that begins with saved weights isn't."""

    def look(self, pictures: Tensor) -> None:
        """Is shown normalised training pictures [n, C, S, S], unvaried, the same at any number of processes."""
        raise NotImplementedError
