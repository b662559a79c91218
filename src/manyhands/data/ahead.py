"""Copies to a card on a stream of their own, a batch before it is needed, so that they overlap with computing.

The copy is made from pinned memory: `to` has torch's allocator of it note the stream (copy_kernel_cuda in Copy.cu), and
it hands memory out again only when what is on that stream then is done. What lies on the card belongs to the copies'
stream, so it is told of the stream that reads it. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.core.devices import is_accelerator, is_tested

_MOST_AHEAD = 1

Taken = TypeVar("Taken")
Begun = TypeVar("Begun")


def looking_ahead(items: Iterable[Taken], begin: Callable[[Taken], Begun], most: int = _MOST_AHEAD) -> Iterator[Begun]:
    """What `begin` makes of each item, in order; when one is given out, up to `most` of those behind it have begun.

    What `items` or `begin` raises is raised in the place of its item.
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
            except Exception as error:  # noqa: BLE001 - it is raised below, behind what came before it
                failure, ended = error, True
        if not begun:
            break
        yield begun.popleft()
    if failure is not None:
        raise failure


class CopiesAhead:
    """Copies host tensors to an accelerator on which streams of our own are tested; else leaves all as it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if is_tested(device) else None

    def __call__(self, answers: Iterable[Any]) -> Iterable[Any]:
        """The same (images, labels, anything), in order, with host tensors on the device; others are as they were."""
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
        # torch's loader makes a list of a tuple where it pins, up to some version.
        if not isinstance(answer, tuple | list) or any(values.device.type != "cpu" for values in answer[:2]):
            return answer, None  # an error, or what a data set of the user's has put on a card itself
        with stream:
            copies = [copied_to(self._device, values) for values in answer[:2]]
        return (*copies, answer[2]), stream.record_event()


def copied_to(device: torch.device, values: Tensor) -> Tensor:
    """The values on the device; the host waits for no accelerator, since it copies from pinned memory."""
    if values.device.type == "cpu" and is_accelerator(device) and not (values.is_pinned() and values.is_contiguous()):
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)
