"""Serves samples that must be made, with worker processes or in this one; the numbers are the same."""

import ctypes
import functools
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.core.errors import ManyhandsError, RunError
from manyhands.data.samples import Answer, FileSamples, OwnSamples, Request
from manyhands.data.transforms import Normalise

_MOST_WORKERS = 8
_GRACE_S = 20
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Part = tuple[Tensor, Tensor, Tensor]  # images, labels, samples


def worker_count(wanted: int, processes: int = 1) -> int:
    """How many decoding processes one process should have.

    Args:
        wanted: 0 or more is taken as it is; -1: this machine's cores, shared.
        processes: training processes on this machine.
    """
    if wanted >= 0:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_WORKERS, cores // max(1, processes)))


class WorkerFeed:
    """Answers requests by decoding files or reading the user's data set."""

    def __init__(self, samples: FileSamples | OwnSamples, normalise: Normalise, workers: int) -> None:
        self._samples, self._normalise = samples, normalise
        self._requests = _Requests()
        cheap = isinstance(samples, OwnSamples) and samples.cheap
        count = 0 if cheap else worker_count(workers)
        self._processes = self._start(count) if count else None

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Part]:
        """One part for each request int64 [n], in order; looks ahead by two requests for each worker."""
        asked = self._requests.begin(epoch, requests)
        for answer in self._answers():
            if isinstance(answer, ManyhandsError):
                raise answer
            images, labels = (values.to(self._normalise.device, non_blocking=True) for values in answer)
            yield self._normalise(images), labels, asked.popleft()

    def close(self) -> None:
        """Ends the worker processes; they would end with this process, too."""
        self._processes = None

    def _answers(self) -> Iterator[Answer | ManyhandsError]:
        if self._processes is None:
            yield from map(self._samples.__getitems__, self._requests)
            return
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of fork beside threads, torch of more workers than cores: both are known here.
                warnings.simplefilter("ignore")
                answers = iter(self._processes)
            yield from answers
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            mend = ("is memory or /dev/shm full? try --data.workers 0, or fewer",)
            raise RunError(f"a process that decodes pictures died: {error}", "data.workers", mend) from error

    def _start(self, count: int) -> DataLoader[Any]:
        """Makes torch's loader; its processes start with the first request and stay over the epochs."""
        begin = functools.partial(
            _begin_worker, parent=os.getpid(), follow=threading.current_thread() is threading.main_thread()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return DataLoader(
                self._samples,  # pyright: ignore[reportArgumentType]  # torch calls __getitems__ alone
                batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]
                num_workers=count,
                collate_fn=_as_it_is,
                persistent_workers=True,
                pin_memory=self._normalise.device.type == "cuda",
                worker_init_fn=begin,
                # A fork carries the user's data set over as it is, lambdas and all.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )


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


def _begin_worker(_number: int, *, parent: int, follow: bool) -> None:
    """Runs first in a worker: makes it end with its parent, and not before.

    Ctrl-C and SIGTERM reach the whole process group, but the parent still saves its work then and must not see its
    workers die; so they take no notice, or leave later. `follow` asks the kernel to end the worker at once when its
    parent is gone (the files and ports that a fork inherits would stay open until torch's own watch sees it).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
    if follow and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    warnings.filterwarnings("ignore", module="PIL")  # of broken EXIF data and the like, once for each worker
