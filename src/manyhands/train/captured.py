"""A network whose usual training passes are replayed from CUDA graphs, and all others run as they are.

A graph is what a card was given to do in one pass: forward, loss and backward of one shape and of one division into
groups. It is launched at once, without the network's Python, which is most of a small network's update. What a replay
reads and writes lies always at the same place, so inputs are copied in, and what it gives is copied out.

Source for what a capture may do: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.devices import wait_for
from manyhands.parallel.gradients import Gradients, MicroBatchResult
from manyhands.parallel.network import MicroBatch, ParallelNetwork
from manyhands.parallel.norm import GroupedNorm, forget_seen

# Runs a pass, and gives what that gave and what runs it again: with the same tensors, whatever they then hold.
Capture = Callable[[Callable[[], MicroBatchResult]], tuple[MicroBatchResult, Callable[[], object]]]
# Passes before a capture: kernels are chosen and workspaces made in them. The first may wait for the card.
_BEFORE = 3


def capture_for(device: str) -> Capture | None:
    """What captures passes on a device such as "cuda:0"; None where nothing does."""
    if not device.startswith("cuda"):
        return None

    def capture(run: Callable[[], MicroBatchResult]) -> tuple[MicroBatchResult, Callable[[], object]]:
        graph, stream, usual = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(usual)
        # The stream is taken here too: a capture that fails may leave its own one current.
        with warnings.catch_warnings(), torch.cuda.stream(stream):
            warnings.simplefilter("ignore")
            run()
            _run_unwaiting(run)
            # Other threads, such as a loader's, may meanwhile do what a capture forbids.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                found = run()
        usual.wait_stream(stream)
        return found, graph.replay

    return capture


def _run_unwaiting(run: Callable[[], MicroBatchResult]) -> None:
    """Runs what doesn't wait for the card, or raises RuntimeError: to fail within a capture would cost more."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(_BEFORE - 1):
            run()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclasses.dataclass(frozen=True)
class CapturedPass:
    """One kind of pass; tensors at the places that its graph reads and writes."""

    part: MicroBatch  # its inputs [n, …] and labels int64 [n]
    found: MicroBatchResult  # the loss [] and logits [n, C]
    gradients: list[tuple[nn.Parameter, Tensor]]  # of this pass alone
    # what each BatchNorm had seen before, zeros while nothing is copied in, and has then: sums in the order of a pass
    seen: list[tuple[GroupedNorm, Tensor, Tensor]]
    replay: Callable[[], object]


class CapturedPasses:
    """Captures passes, and takes the place of `Gradients.forward_backward` for those that are like them.

    Args:
        gradients: of the trainer, which others use too.
        own: the same once more. A graph reads its tensors for ever, so no other passes may change or free them.
        capture: makes a graph of a pass.
    """

    def __init__(self, gradients: Gradients, own: Gradients, capture: Capture) -> None:
        self._network: ParallelNetwork = gradients.network
        self._own, self._capture = own, capture
        own.scaler = gradients.scaler  # which changes its scale in place
        self._trained = [one for one in self._network.inner.parameters() if one.requires_grad]
        self._layers = list(self._network.inner.modules())
        self._places = self._where()
        self._known: dict[Any, CapturedPass] = {}
        self.replays = 0

    def add(self, part: MicroBatch, divisor: float) -> None:
        """Captures a pass; the network's parameters stay as they are, but what a forward changes is changed.

        Raises:
            RuntimeError: it can't be captured.
        """
        static = dataclasses.replace(part, inputs=part.inputs.clone(), labels=part.labels.clone())

        before: list[tuple[GroupedNorm, Tensor]] = []

        def run() -> MicroBatchResult:
            self._clear()
            for layer, zeros in before:
                layer.seen = zeros
            return self._own.forward_backward(static, divisor, last=False)

        run()
        before += [(one, torch.zeros_like(one.seen)) for one in self._network.norms.layers if one.seen is not None]
        found, replay = self._capture(run)
        gradients = [(one, one.grad) for one in self._trained if one.grad is not None]
        seen = [(layer, zeros, layer.seen) for layer, zeros in before if layer.seen is not None]
        self._clear()
        if any(gradient.layout != torch.strided for _, gradient in gradients):
            raise RuntimeError("some of its gradients are sparse")
        kind = self._kind(static.inputs, static.labels, divisor)
        self._known[kind] = CapturedPass(static, found, gradients, seen, replay)

    def __call__(self, inputs: Tensor, labels: Tensor, divisor: float | Tensor) -> tuple[Tensor, Tensor] | None:
        """Adds a pass's gradients to those that are there; its loss [] and logits [n, C]; None: not captured."""
        one = self._known.get(self._kind(inputs, labels, divisor))
        if one is None or self._places != self._where():
            return None
        with torch.no_grad():
            one.part.inputs.copy_(inputs)
            one.part.labels.copy_(labels)
            further = [(layer.seen, zeros) for layer, zeros, _ in one.seen if layer.seen is not None]
            for seen, zeros in further:
                zeros.copy_(seen)
            one.replay()
            self.replays += 1
            _hand_over(one)
            for _, zeros in further:
                zeros.zero_()
            loss, logits = _copies([one.found.loss, one.found.logits])
        return loss, logits

    def release(self) -> None:
        """Gives the graphs' memory back."""
        wait_for(self._own.world.device)
        self._known.clear()

    def _kind(self, inputs: Tensor, labels: Tensor, divisor: float | Tensor) -> Any:
        """What a pass must be alike in; None for one that others take part in, or that is weighted by a tensor."""
        norms = self._network.norms
        if norms.shared_sizes or isinstance(divisor, Tensor) or not self._network.inner.training:
            return None
        tensors = [(one.shape, one.dtype, one.device) for one in (inputs, labels)]
        return *tensors, divisor, norms.spans, norms.batch, norms.weight

    def _where(self) -> list[Any]:
        """Where each parameter lies, whether it is trained, and which layers train: a graph goes by what that was."""
        layers = [one.training for one in self._layers]
        return [*layers, *((one.data_ptr(), one.requires_grad) for one in self._trained)]

    def _clear(self) -> None:
        for one in self._trained:
            one.grad = None
        forget_seen(self._network.inner)


def _hand_over(one: CapturedPass) -> None:
    """Adds what a replay has written to what is there, as a pass would have; never the graph's own memory."""
    fresh = [(parameter, gradient) for parameter, gradient in one.gradients if parameter.grad is None]
    others = [(parameter.grad, gradient) for parameter, gradient in one.gradients if parameter.grad is not None]
    if others:
        torch._foreach_add_([gradient for gradient, _ in others], [gradient for _, gradient in others])
    copies = iter(_copies([*(gradient for _, gradient in fresh), *(seen for _, _, seen in one.seen)]))
    for parameter, _ in fresh:
        parameter.grad = next(copies)
    for layer, _, _ in one.seen:
        layer.seen = next(copies)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(one) for one in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies
