"""Loaders, which serve requested samples as batches on the device."""

import functools
import multiprocessing.util
import os
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.core.devices import is_accelerator, is_tested
from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.machine import cores
from manyhands.core.scratch import of_this_start
from manyhands.data.child import begin_worker
from manyhands.data.samples import Answer, CustomSamples, FileSamples, Request
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source
from manyhands.data.transforms import Batch, Normalise, Pixels, augment, middle, set_channels

_MOST_WORKERS = 8
# The path of a Unix socket has at most 107 bytes, of which multiprocessing adds 32.
_LONGEST_SOCKET_FOLDER = 75
# Folders for sockets if TMPDIR is too long.
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_AHEAD_REQUESTS = 64
_AHEAD_BYTES = 512 << 10  # of normalised float32 pixels: leaves most of a core's cache to the network
_RESIZED_BYTES = 512 << 20  # a set that stays smaller than this is resized once, a larger one batch by batch
_BLOCK = 1024

Taken = TypeVar("Taken")
Begun = TypeVar("Begun")


class Loader(ABC):
    """Serves one split of a data set.

    Attributes:
        replaced: paths of unreadable pictures that were replaced by others; emptied by the caller that reports them.
    """

    def __init__(self) -> None:
        self.replaced: list[str] = []

    @abstractmethod
    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """Yields a batch for each request, an int64 tensor [n] of sample indices, in order.

        Reads up to 64 requests ahead. The pixels of a sample depend on the seed, the epoch and the sample alone. Only
        one iterator may be active; drop it to stop early.

        Raises:
            CorruptImageError: a picture can't be read.
        """

    def close(self) -> None:  # noqa: B027 - most loaders have nothing to end
        """Ends the worker processes, if there are any."""


def open_loader(  # noqa: PLR0913 - all but two are named
    source: Source,
    pixels: Pixels,
    *,
    train: bool,
    seed: int,
    device: str = "cpu",
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    classes: int = 0,
    replaces: bool = False,
) -> Loader:
    """Creates a loader; reads nothing and starts no process yet.

    Args:
        source: the samples.
        pixels: preprocessing. Pictures are normalized in float32 (in float64 for float64), then converted to `dtype`.
        train: augment the pictures.
        seed: of the augmentation.
        device: torch device of the batches.
        workers: decoding processes for samples that are not in memory; 0: this process, -1: depends on the cores.
        dtype: of the pictures.
        channels_last: memory format of the pictures.
        classes: labels of the user's own samples must be below this; 0: not checked.
        replaces: replace training pictures that can't be read by others.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    normalise = Normalise(pixels, torch.device(device), dtype, layout)
    if isinstance(source, ImagesInMemory):
        return MemoryLoader(source, pixels, normalise, train=train, seed=seed)
    if isinstance(source, ImageFiles):
        samples = FileSamples(source, pixels, train=train, seed=seed, replaces=replaces)
    else:
        samples = CustomSamples(source, pixels, train=train, seed=seed, classes=classes)
    return WorkerLoader(samples, normalise, workers)


class MemoryLoader(Loader):
    """Serves pictures in memory: several requests are gathered, augmented and normalized at once.

    A request of 32 small pictures costs a dozen tensor operations, more time than its pixels need. Batches are views of
    the larger result. The values are the same, because augmentation is a pure function of the sample, and each pixel is
    normalized separately.
    """

    def __init__(self, source: ImagesInMemory, pixels: Pixels, normalise: Normalise, *, train: bool, seed: int) -> None:
        super().__init__()
        self._pixels, self._normalise, self._train, self._seed = pixels, normalise, train, seed
        self._cuts = train and pixels.augment == "resized-crop-flip"
        images = _on_device(source.images, normalise.device)
        ready = images.shape[2:] == (pixels.size, pixels.size) and pixels.resized_to == pixels.size
        resized_bytes = len(images) * images.shape[1] * pixels.size**2
        self._sized = not self._cuts and (ready or resized_bytes <= _RESIZED_BYTES)
        if self._sized and not ready:
            images = torch.cat([middle(block, pixels) for block in images.split(_BLOCK)])
        self._shape = images.shape[1:]
        self._flat = images.reshape(len(images), -1)  # rows of bytes: the fastest gather
        self._labels = source.labels.to(images.device)
        # Copies from unpinned memory wait for all earlier work of the device.
        self._pins = is_accelerator(normalise.device)
        self._copied = self._pins and images.device.type == "cpu"
        self._ahead = CopiesAhead(normalise.device if self._copied else torch.device("cpu"))
        self._ahead_samples = max(1, _AHEAD_BYTES // (4 * pixels.channels * pixels.size**2))

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        gathered = map(self._gathered, _grouped(iter(requests), self._ahead_samples))
        for images, labels, (group, samples) in self._ahead(gathered):
            sizes = [len(request) for request in group]
            images = copied_to(self._normalise.device, images).view(-1, *self._shape)
            images = set_channels(images, self._pixels.channels)
            if not (self._cuts or self._sized):
                images = middle(images, self._pixels)
            if self._train:
                images = augment(images, self._pixels, self._seed, epoch, samples)
            served = self._normalise(images).split(sizes)
            yield from map(Batch, served, copied_to(self._normalise.device, labels).split(sizes), group)

    def _gathered(self, group: list[Tensor]) -> tuple[Tensor, Tensor, tuple[list[Tensor], Tensor]]:
        """Returns uint8 [n, C H W], labels int64 [n], and the requests with their concatenation."""
        samples = group[0] if len(group) == 1 else torch.cat(group)
        if self._pins:
            samples = samples.pin_memory()
        where = samples.to(self._flat.device, non_blocking=True)
        out = None
        if self._copied:
            out = torch.empty((len(samples), self._flat.shape[1]), dtype=self._flat.dtype, pin_memory=True)
        images = torch.index_select(self._flat, 0, where, out=out)
        return images, self._labels.index_select(0, where), (group, samples)


def _grouped(requests: Iterable[Tensor], samples: int) -> Iterator[list[Tensor]]:
    """Groups requests of at most `samples` samples together, up to 64."""
    group: list[Tensor] = []
    held = 0
    for request in requests:
        if group and (held + len(request) > samples or len(group) == _AHEAD_REQUESTS):
            yield group
            group, held = [], 0
        group.append(request)
        held += len(request)
    if group:
        yield group


def _on_device(images: Tensor, device: torch.device) -> Tensor:
    """Moves the pictures to an accelerator if they take at most half of its free memory."""
    if not is_tested(device):
        return images
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


def worker_count(requested: int, processes: int = 1) -> int:
    """Returns the number of decoding processes of one training process; -1 requests its share of the cores."""
    if requested >= 0:
        return requested
    return max(1, min(_MOST_WORKERS, int(cores()) // max(1, processes)))


class WorkerLoader(Loader):
    """Decodes files or reads the user's data set, in worker processes or in this one; the values are the same.

    Looks ahead by two requests for each worker, and by one more on an accelerator.
    """

    def __init__(self, samples: FileSamples | CustomSamples, normalise: Normalise, workers: int) -> None:
        super().__init__()
        self._samples, self._normalise = samples, normalise
        self._ahead = CopiesAhead(normalise.device)
        self._requests = _Requests()
        cheap = isinstance(samples, CustomSamples) and samples.cheap
        self._count = 0 if cheap else worker_count(workers)
        self._loader: DataLoader[Any] | None = None
        self._answers: Any = None  # torch's iterator; owns the processes

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        posted = self._requests.begin(epoch, requests)
        answers = self._from_workers() if self._count else map(self._samples.__getitems__, self._requests)
        for answer in self._ahead(answers):
            if isinstance(answer, ManyhandsError):
                self.close()
                raise answer
            self.replaced += answer[2]
            images, labels = (copied_to(self._normalise.device, values) for values in answer[:2])
            yield Batch(self._normalise(images), labels, posted.popleft())

    def close(self) -> None:
        """Ends the worker processes; a later request starts new ones.

        torch ends them when its iterator is collected. In a cycle (any exception makes one) the queues may be collected
        first, and the wait for the workers takes ten seconds.
        """
        end = getattr(self._answers, "_shutdown_workers", None)
        self._answers = self._loader = None
        if end is not None:
            end()

    def _from_workers(self) -> Iterator[Answer | ManyhandsError]:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of fork beside threads, torch of more workers than cores: both are intended.
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
            collate_fn=_identity,
            persistent_workers=True,
            pin_memory=is_accelerator(self._normalise.device),
            worker_init_fn=functools.partial(begin_worker, parent=os.getpid(), follow=in_main_thread),
            # A fork carries the user's data set over, lambdas included.
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
    """The batch sampler of torch's loader: the requests of the current epoch."""

    def __init__(self) -> None:
        self._epoch = 0
        self._requests: Iterable[Tensor] = ()
        self._posted: deque[Tensor] = deque()

    def begin(self, epoch: int, requests: Iterable[Tensor]) -> deque[Tensor]:
        """Takes new requests; returns the queue of those that were passed on, in order."""
        self._epoch, self._requests, self._posted = epoch, requests, deque()
        return self._posted

    def __iter__(self) -> Iterator[Request]:
        posted = self._posted
        for samples in self._requests:
            posted.append(samples)
            yield self._epoch, samples.tolist()


def _identity(answer: Any) -> Any:
    """Collates nothing: each answer is a batch."""
    return answer


def looking_ahead(items: Iterable[Taken], begin: Callable[[Taken], Begun], most: int = 1) -> Iterator[Begun]:
    """Yields `begin(item)` for each item, in order, and begins up to `most` items ahead.

    An exception of `items` or `begin` is raised in the place of its item.
    """
    source, begun = iter(items), deque[Begun]()
    failure: Exception | None = None
    ended = False
    while True:
        while len(begun) <= most and not ended:
            try:
                begun.append(begin(next(source)))
            except StopIteration:
                ended = True
            except Exception as error:  # noqa: BLE001 - raised below, behind the items before it
                failure, ended = error, True
        if not begun:
            break
        yield begun.popleft()
    if failure is not None:
        raise failure


class CopiesAhead:
    """Copies batches to an accelerator on a stream of its own, one ahead, to overlap with computing.

    Does nothing unless the accelerator is one on which streams are tested. Copies read pinned memory: torch's allocator
    notes the stream (copy_kernel_cuda in Copy.cu) and reuses the memory when the copy is done. The copies' memory
    belongs to their stream, so the allocator is told which stream reads it.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if is_tested(device) else None

    def __call__(self, answers: Iterable[Any]) -> Iterable[Any]:
        """Yields the same (images, labels, anything), in order, with host tensors copied to the device."""
        return answers if self._stream is None else self._copied(answers, self._stream)

    def _copied(self, answers: Iterable[Any], stream: torch.Stream) -> Iterator[Any]:
        for answer, done in looking_ahead(answers, lambda answer: self._begin(answer, stream)):
            if done is not None:
                reading = torch.accelerator.current_stream(self._device)
                reading.wait_event(done)
                for copy in answer[:2]:
                    copy.record_stream(reading)
            yield answer

    def _begin(self, answer: Any, stream: torch.Stream) -> tuple[Any, Any]:
        # Some versions of torch's loader turn a tuple into a list when pinning.
        if not isinstance(answer, tuple | list) or any(values.device.type != "cpu" for values in answer[:2]):
            return answer, None  # an error, or tensors that the user's data set has put on a device
        with stream:
            copies = [copied_to(self._device, values) for values in answer[:2]]
        return (*copies, answer[2]), stream.record_event()


def copied_to(device: torch.device, values: Tensor) -> Tensor:
    """Copies values to a device from pinned memory, so that the host doesn't wait for an accelerator."""
    if values.device.type == "cpu" and is_accelerator(device) and not (values.is_pinned() and values.is_contiguous()):
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)
