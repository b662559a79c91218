"""What is said where memory ran out is tried as the job computes: in its precision, training or evaluating."""

from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.core.run_folder import RunFolder
from manyhands.core.world import ProcessInfo, World
from manyhands.parallel.group import join as group
from manyhands.run.python import _dotted_options
from manyhands.train.build import build
from manyhands.train.objects import Objects
from manyhands.train.parts import Parts
from manyhands.worker.failure import explain_memory


class Hungry(nn.Module):
    """Runs out of memory above so many samples: half as many in single precision."""

    def __init__(self):
        super().__init__()
        self.inner, self.fits, self.kinds = nn.Linear(64, 5), 1000, set()

    def forward(self, images):
        output = self.inner(images.flatten(1))
        self.kinds.add(output.dtype)
        if len(images) > self.fits // (1 if output.dtype == torch.bfloat16 else 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output


@pytest.mark.parametrize(("precision", "fits"), [("bf16", 4), ("fp32", 2)])
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_the_advice_is_tried_in_the_jobs_precision(tmp_path, precision, fits, phase):
    flags = {
        "data.name": "synthetic:40x1x8x8x5", "train.batch": 16, "train.evaluate_batch": 16,
        "train.precision": precision,
    }  # fmt: skip
    network = Hungry()
    trainer = build(
        Parts.from_job(
            load_job(flags, environment={}).job, RunFolder(Path(tmp_path)), World(), "single", Objects(network)
        )
    )
    network.fits, trainer.heartbeats.phase = 4, phase
    network.kinds.clear()
    hints = explain_memory(torch.OutOfMemoryError("CUDA out of memory"), trainer).hints
    trainer.resources.close()
    assert network.kinds == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert f"_batch={fits}" in hints[0]
    assert ("precision=bf16" in hints[-1]) == (precision == "fp32")


def test_a_process_of_its_own_uses_the_device_that_it_was_given(monkeypatch):
    used = []
    monkeypatch.setattr(group, "_choose_device", lambda process_info: process_info.device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    assert group.join(ProcessInfo(device="cuda:1"), "", 60, print).world.device == "cuda:1"
    assert used == ["cuda:1"]
    group.join(ProcessInfo(device="cpu"), "", 60, print)
    assert len(used) == 1


def test_an_option_of_another_section_is_named():
    with pytest.raises(UserError) as raised:
        _dotted_options({"device": "cuda:1"}, "fit")
    assert raised.value.hints == ("did you mean cluster__device?",)
