"""Compiles one network and times its passes, for the process that started this one and reads what it has written."""

import copy
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from manyhands.config.job import Job
from manyhands.parallel.gradients import autocast
from manyhands.parallel.norm import forget_seen, group_batch_norms
from manyhands.planner.precision import Trial, time_variants
from manyhands.train.rehearse import tensors_of
from manyhands.worker.plan_trials import make_network

# Compiled gradients may be so many times as far from those in double precision as the others are, and by this.
_TIMES, _BESIDES = 3.0, 1e-6


def try_out(given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a pass, "plain" and "compiled", and of "making" it; or why it is "refused"."""
    job, device = Job.model_validate(given["job"]), given["device"]
    torch.set_num_threads(1)
    own = given["model"]
    model = own.to(device).train() if own is not None else make_network(job, given["facts"], device)
    kind = torch.channels_last if job.train.channels_last is True else torch.contiguous_format
    images = given["images"].to(device)
    images = images.to(memory_format=kind) if images.ndim == 4 else images
    if job.train.precision == "fp64":
        model, images = model.double(), images.double()
    group_batch_norms(model)
    exact = _gradients(copy.deepcopy(model).double(), images.double(), "fp64", device)
    compiled = copy.deepcopy(model)
    compiled.compile(dynamic=False)
    began = time.perf_counter()
    found = _gradients(compiled, images, job.train.precision, device)
    making_s = time.perf_counter() - began
    usual, apart = (_apart(one, exact) for one in (_gradients(model, images, job.train.precision, device), found))
    if not apart <= _TIMES * usual + _BESIDES:
        return {"refused": f"its gradients would be {apart:.1g} from the exact ones, and are {usual:.1g}"}
    trials = {
        name: Trial(
            lambda one=one: forget_seen(one),
            lambda one=one: _gradients(one, images, job.train.precision, device)[0].sum(),
        )
        for name, one in (("plain", model), ("compiled", compiled))
    }
    seconds, failed = time_variants(trials, device)
    return {"refused": next(iter(failed.values()))} if failed else {**seconds, "making": making_s}


def _gradients(model: nn.Module, images: Tensor, precision: str, device: str) -> list[Tensor]:
    """Of a sum of the outputs, each with a weight that is always the same; what is drawn follows from one seed."""
    forget_seen(model)
    torch.manual_seed(0)
    with autocast(precision, device):
        outputs = tensors_of(model(images))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in outputs]
    loss = torch.stack([(one * weight).double().sum() for one, weight in zip(outputs, weights, strict=True)]).sum()
    trained = [one for one in model.parameters() if one.requires_grad]
    return [one for one in torch.autograd.grad(loss, trained, allow_unused=True) if one is not None]


def _apart(found: list[Tensor], exact: list[Tensor]) -> float:
    """How far gradients are from others, as a share of these."""
    squares = [((one.double() - other) ** 2).sum() for one, other in zip(found, exact, strict=True)]
    whole = sum(float((other**2).sum()) for other in exact)
    return (sum(map(float, squares)) / whole) ** 0.5 if whole else 0.0


def _end_with_parent() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Reads what it is to try from one file of the command line, and writes what it found into the other."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Path(sys.argv[1]).open("rb") as file:
        sys.path[:] = cloudpickle.load(file)
        given = cloudpickle.load(file)
    try:
        found = try_out(given)
    except Exception as error:  # noqa: BLE001 - whatever a network or a compiler says
        found = {"refused": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
