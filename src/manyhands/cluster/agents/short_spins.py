"""How long threads of OpenMP wait for each other awake, before they sleep until they are woken."""

import os
from collections.abc import Generator
from contextlib import contextmanager

# Of libgomp, which torch's wheels for Linux have, and reads once, when torch is loaded. By itself it tries 300,000
# times, some milliseconds, while the one that is waited for may wait for this core.
_TRIES, _COUNT = "GOMP_SPINCOUNT", "3000"


@contextmanager
def short_spins() -> Generator[None]:
    """Has torch that is imported within have such threads, unless the user's environment says how they wait."""
    if _TRIES in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[_TRIES] = _COUNT
    try:
        yield
    finally:
        os.environ.pop(_TRIES, None)  # what is started from here has the user's own environment
