"""Every process sends its gradients in every update and gets the mean: DDP's own reducer, in full precision."""

DESCRIPTION = "the mean of all gradients in every update, in full precision"


def sent_bytes(gradient_bytes: int, processes: int) -> float:
    """Bytes that each process sends in one update, by a ring.

    Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    return 2 * (processes - 1) / processes * gradient_bytes
