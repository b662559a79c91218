"""Serves samples that must be made, with worker processes or in this one; the numbers are the same."""

import functools
import multiprocessing.util
import os
import sys
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.core.devices import is_accelerator
from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.scratch import of_this_start
from manyhands.data.ahead import CopiesAhead, copied_to
from manyhands.data.child import begin_worker
from manyhands.data.on_demand import Answer, CustomSamples, FileSamples, Request
from manyhands.data.transforms import Batch, Normalise

_MOST_WORKERS = 8
# The path of a Unix socket has at most 107 bytes, of which multiprocessing adds 32.
_LONGEST_SOCKET_FOLDER = 75
# Folders for sockets if TMPDIR is too long.
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def worker_count(wanted: int, processes: int = 1) -> int:
    """How many decoding processes one training process should have; -1: its share of this machine's cores."""
    if wanted >= 0:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_WORKERS, cores // max(1, processes)))


class WorkerFeed:
    """Answers requests by decoding files or reading the user's data set."""

    def __init__(self, samples: FileSamples | CustomSamples, normalise: Normalise, workers: int) -> None:
        self._samples, self._normalise = samples, normalise
        self._ahead = CopiesAhead(normalise.device)
        self._requests = _Requests()
        self.replaced: list[str] = []  # pictures that others were given for, since somebody has taken these names
        cheap = isinstance(samples, CustomSamples) and samples.cheap
        self._count = 0 if cheap else worker_count(workers)
        self._loader: DataLoader[Any] | None = None
        self._answers: Any = None  # torch's iterator; owns the processes

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each request int64 [n], in order; looks ahead by two for each worker, on a card by one more."""
        asked = self._requests.begin(epoch, requests)
        answers = self._from_workers() if self._count else map(self._samples.__getitems__, self._requests)
        for answer in self._ahead(answers):
            if isinstance(answer, ManyhandsError):
                self.close()
                raise answer
            self.replaced += answer[2]
            images, labels = (copied_to(self._normalise.device, values) for values in answer[:2])
            yield Batch(self._normalise(images), labels, asked.popleft())

    def close(self) -> None:
        """Ends the worker processes; a later request starts new ones.

        torch would end them when its iterator is collected. Where that happens in a cycle (any exception makes one)
        the queues may go first, and the wait for the workers takes ten seconds; so it is told here.
        """
        end = getattr(self._answers, "_shutdown_workers", None)
        self._answers = self._loader = None
        if end is not None:
            end()

    def _from_workers(self) -> Iterator[Answer | ManyhandsError]:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of fork beside threads, torch of more workers than cores: both are known here.
                warnings.simplefilter("ignore")
                self._loader = self._start() if self._loader is None else self._loader
                self._answers = iter(self._loader)
            yield from self._answers
        except Exception as error:
            self.close()
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            hints = ("free memory or space in /dev/shm, or lower --data.workers (0: none)",)
            raise RunError(f"a decoding process ended unexpectedly: {error}", "data.workers", hints) from error

    def _start(self) -> DataLoader[Any]:
        keep_sockets_of_this_start()
        in_main_thread = threading.current_thread() is threading.main_thread()
        return DataLoader(
            self._samples,  # pyright: ignore[reportArgumentType]  # torch calls __getitems__ alone
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]
            num_workers=self._count,
            collate_fn=_as_it_is,
            persistent_workers=True,
            pin_memory=is_accelerator(self._normalise.device),
            worker_init_fn=functools.partial(begin_worker, parent=os.getpid(), follow=in_main_thread),
            # A fork carries the user's data set over as it is, lambdas and all.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )


def keep_sockets_of_this_start() -> None:
    """Puts the sockets of multiprocessing into the folder of this start, where killed data workers leave none behind.

    multiprocessing makes its folder when a process first passes a tensor; forked processes inherit this one. If the
    path is too long for a socket, the temporary folder or another short folder takes its place.

    Raises:
        RunError: no writable folder has a path that is short enough.
    """
    before = tempfile.gettempdir()
    for place in map(str, filter(None, (of_this_start(), before, *_SHORT))):
        if len(os.fsencode(place)) <= _LONGEST_SOCKET_FOLDER and os.access(place, os.W_OK | os.X_OK):
            break
    else:
        hints = ("set a shorter path: export TMPDIR=/tmp",)
        raise RunError(f"the path {before} is too long for Unix sockets", "TMPDIR", hints)
    tempfile.tempdir = place
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


class _Requests:
    """What torch's loader draws from: the requests of the present epoch."""

    def __init__(self) -> None:
        self._epoch = 0
        self._requests: Iterable[Tensor] = ()
        self._asked: deque[Tensor] = deque()

    def begin(self, epoch: int, requests: Iterable[Tensor]) -> deque[Tensor]:
        """Takes new requests; returns where those that were passed on are noted, in order."""
        self._epoch, self._requests, self._asked = epoch, requests, deque()
        return self._asked

    def __iter__(self) -> Iterator[Request]:
        asked = self._asked
        for samples in self._requests:
            asked.append(samples)
            yield self._epoch, samples.tolist()


def _as_it_is(answer: Any) -> Any:
    """Each answer is a whole batch already."""
    return answer
