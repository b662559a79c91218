"""Loaders, which turn lists of sample indices into batches on the device."""

import functools
import multiprocessing.util
import os
import sys
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.core.devices import is_accelerator, is_tested_accelerator
from manyhands.core.errors import ManyhandsError, RunError
from manyhands.core.machine import cores
from manyhands.core.scratch import workers_folder
from manyhands.data.child import set_up_worker
from manyhands.data.samples import Answer, CustomSamples, FileSamples, Request
from manyhands.data.splits import ImageFiles, ImagesInMemory, Source
from manyhands.data.transforms import Batch, Normalize, Pixels, augment, center_crop, set_channels

_MOST_WORKERS = 8
_LONGEST_SOCKET_FOLDER = 75  # a Unix socket's path has at most 107 bytes, of which multiprocessing adds 32
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # alternatives if TMPDIR is too long
_AHEAD_REQUESTS = 64
_AHEAD_BYTES = 512 << 10  # bytes of float32 pixels, which leave most of a core's cache to the network
_RESIZED_BYTES = 512 << 20  # a larger set is resized batch by batch
_BLOCK = 1024


class Loader(ABC):
    """Loads batches from one split of a data set."""

    def __init__(self) -> None:
        self.replaced: list[str] = []

    @abstractmethod
    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """Yields a batch for each request, in order. A request is a tensor of sample indices, int64 [n].

        Prefetches, so only one iterator may be active. A sample's pixels depend only on the seed, the epoch and its
        index. Raises CorruptImageError if a picture can't be read.
        """

    def close(self) -> None:  # noqa: B027 - most loaders have nothing to end
        """Ends the worker processes."""


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
    """Creates a loader without reading data or starting processes.

    Pictures are normalized in float32 (float64 if `dtype` is float64), then converted to `dtype`. `workers`: number of
    decoding processes for samples that aren't in memory (0: decode in this process, -1: chosen by the number of cores).
    `classes`: number of classes, to check the labels of user data (0: don't check). With `replaces`, an unreadable
    training picture is replaced by another picture instead of raising an error.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    normalize = Normalize(pixels, torch.device(device), dtype, layout)
    if isinstance(source, ImagesInMemory):
        return MemoryLoader(source, pixels, normalize, train=train, seed=seed)
    if isinstance(source, ImageFiles):
        samples = FileSamples(source, pixels, train=train, seed=seed, replaces=replaces)
    else:
        samples = CustomSamples(source, pixels, train=train, seed=seed, classes=classes)
    return WorkerLoader(samples, normalize, workers)


class MemoryLoader(Loader):
    """Loads pictures from memory. Processes several small requests at once, which takes fewer operations.

    The results are the same, because augmentation depends only on the sample and normalization only on the pixel.
    """

    def __init__(self, source: ImagesInMemory, pixels: Pixels, normalize: Normalize, *, train: bool, seed: int) -> None:
        super().__init__()
        self._pixels, self._normalize, self._train, self._seed = pixels, normalize, train, seed
        self._cuts = train and pixels.augment == "resized-crop-flip"
        images = _on_device(source.images, normalize.device)
        ready = images.shape[2:] == (pixels.size, pixels.size) and pixels.resized_to == pixels.size
        resized_bytes = len(images) * images.shape[1] * pixels.size**2
        self._sized = not self._cuts and (ready or resized_bytes <= _RESIZED_BYTES)
        if self._sized and not ready:
            images = torch.cat([center_crop(block, pixels) for block in images.split(_BLOCK)])
        self._shape = images.shape[1:]
        self._flat = images.reshape(len(images), -1)  # rows of bytes: the fastest gather
        self._labels = source.labels.to(images.device)
        # Copies from unpinned memory wait for all earlier work of the device.
        self._pins = is_accelerator(normalize.device)
        self._copied = self._pins and images.device.type == "cpu"
        self._ahead_samples = max(1, _AHEAD_BYTES // (4 * pixels.channels * pixels.size**2))

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        for group in _group_requests(requests, self._ahead_samples):
            samples = group[0] if len(group) == 1 else torch.cat(group)
            samples = samples.pin_memory() if self._pins else samples
            images, labels = self._gather(samples)
            images = copy_to_device(self._normalize.device, images).view(-1, *self._shape)
            images = set_channels(images, self._pixels.channels)
            if not (self._cuts or self._sized):
                images = center_crop(images, self._pixels)
            if self._train:
                images = augment(images, self._pixels, self._seed, epoch, samples)
            sizes = [len(request) for request in group]
            labels = copy_to_device(self._normalize.device, labels)
            yield from map(Batch, self._normalize(images).split(sizes), labels.split(sizes), group)

    def _gather(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns pictures, uint8 [n, C * H * W], and labels, int64 [n]."""
        where, out = samples.to(self._flat.device, non_blocking=True), None
        if self._copied:
            out = torch.empty((len(samples), self._flat.shape[1]), dtype=self._flat.dtype, pin_memory=True)
        return torch.index_select(self._flat, 0, where, out=out), self._labels.index_select(0, where)


def _group_requests(requests: Iterable[Tensor], samples: int) -> Iterator[list[Tensor]]:
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
    """Moves pictures to an accelerator if they fit into half of its free memory. Otherwise returns `images`."""
    if not is_tested_accelerator(device):
        return images
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return images.to(device) if images.nbytes <= free // 2 else images


def workers_per_rank(requested: int, processes: int = 1) -> int:
    """Returns the number of decoding processes per rank: `requested` or, for -1, the rank's cores, at most 8."""
    if requested >= 0:
        return requested
    return max(1, min(_MOST_WORKERS, int(cores()) // max(1, processes)))


class WorkerLoader(Loader):
    """Decodes files or reads user data in this process or in worker processes, each two requests ahead."""

    def __init__(self, samples: FileSamples | CustomSamples, normalize: Normalize, workers: int) -> None:
        super().__init__()
        self._samples, self._normalize = samples, normalize
        self._requests = _RequestSampler()
        plain = isinstance(samples, CustomSamples) and samples.tensors is not None
        self._count = 0 if plain else workers_per_rank(workers)
        self._loader: DataLoader[Any] | None = None
        self._answers: Any = None  # torch's iterator, which owns the processes

    def batches(self, epoch: int, requests: Iterable[Tensor]) -> Iterator[Batch]:
        posted = self._requests.begin(epoch, requests)
        answers = self._receive_answers() if self._count else map(self._samples.__getitems__, self._requests)
        for answer in answers:
            if isinstance(answer, ManyhandsError):
                self.close()
                raise answer
            self.replaced += answer[2]
            images, labels = (copy_to_device(self._normalize.device, values) for values in answer[:2])
            yield Batch(self._normalize(images), labels, posted.popleft())

    def close(self) -> None:
        """Ends the worker processes now. The garbage collector might close their queues first, and wait 10 seconds."""
        end = getattr(self._answers, "_shutdown_workers", None)
        self._answers = self._loader = None
        if end is not None:
            end()

    def _receive_answers(self) -> Iterator[Answer | ManyhandsError]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about fork in a process with threads, and more workers than cores
                self._loader = self._start_workers() if self._loader is None else self._loader
                self._answers = iter(self._loader)
            yield from self._answers
        except Exception as error:
            self.close()
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            hints = ("free memory or space in /dev/shm, or lower --data.workers (0: none)",)
            raise RunError(f"a decoding process ended unexpectedly: {error}", "data.workers", hints) from error

    def _start_workers(self) -> DataLoader[Any]:
        create_socket_folder()
        in_main_thread = threading.current_thread() is threading.main_thread()
        return DataLoader(
            self._samples,  # pyright: ignore[reportArgumentType]  # torch calls __getitems__ alone
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]
            num_workers=self._count,
            collate_fn=_return_unchanged,
            persistent_workers=True,
            pin_memory=is_accelerator(self._normalize.device),
            worker_init_fn=functools.partial(set_up_worker, parent=os.getpid(), end_with_thread=in_main_thread),
            # A fork inherits the user's data set, lambdas included.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )


def create_socket_folder() -> None:
    """Creates the folder for multiprocessing's sockets: in the temporary folder of the run if its path is short enough.

    Forked processes inherit the folder. Without this call, each process creates its own when it first sends a tensor.
    Raises RunError if no writable folder has a path that is short enough.
    """
    before = tempfile.gettempdir()
    for place in map(str, filter(None, (workers_folder(), before, *_SHORT))):
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


class _RequestSampler:
    """A batch sampler for torch's DataLoader, which yields the requests of the current epoch."""

    def begin(self, epoch: int, requests: Iterable[Tensor]) -> deque[Tensor]:
        """Sets the requests of an epoch. Returns a queue to which each request is added when it is sent to a worker."""
        self._epoch, self._requests, self._posted = epoch, requests, deque[Tensor]()
        return self._posted

    def __iter__(self) -> Iterator[Request]:
        posted = self._posted
        for samples in self._requests:
            posted.append(samples)
            yield self._epoch, samples.tolist()


def _return_unchanged(answer: Any) -> Any:
    return answer


def copy_to_device(device: torch.device, values: Tensor) -> Tensor:
    """Copies values to a device through pinned memory, so that the host doesn't wait for an accelerator."""
    if values.device.type == "cpu" and is_accelerator(device) and not (values.is_pinned() and values.is_contiguous()):
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)
