"""What stands for a CUDA graph on a processor: the ops of a pass, run again on the tensors that they first had.

As with a graph no Python of the network runs again, inputs are read where they lay, all that ops give is written where
it was first written, gradients too, and what is drawn comes from the device's generator as it then is. What a graph
can't record, a value that Python asks for, is refused likewise.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Recorder(TorchDispatchMode):
    """Keeps each op with its arguments and results; `lets_ask` records past a value that Python asks for."""

    def __init__(self, *, lets_ask=False):
        super().__init__()
        self.ops, self._lets_ask = [], lets_ask

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKS and not self._lets_ask:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        if func not in ASKS:
            self.ops.append((func, args, kwargs, result))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self.ops:
                if func.is_view:  # looks at memory that is written to in its place
                    continue
                again = func(*args, **kwargs)
                for one, other in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(one, Tensor) and one is not other and one.data_ptr() != other.data_ptr():
                        one.copy_(other)


def recording(*, lets_ask=False):
    """A `Capture` of train/captured.py."""

    def capture(run):
        for _ in range(3):
            run()
        states = torch.get_rng_state()
        with Recorder(lets_ask=lets_ask) as recorder:
            found = run()
        torch.set_rng_state(states)  # a card computes nothing, and draws nothing, while it records
        return found, recorder.replay

    return capture
