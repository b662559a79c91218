"""Which device a job's word means, and that a CPU's work needs no waiting for, whatever it is called."""

from types import SimpleNamespace

import pytest
import torch

from manyhands.core import devices


@pytest.mark.parametrize(
    ("found", "wanted", "processes", "meant"),
    [
        (None, "auto", 2, "cpu"),
        ("cuda", "auto", 2, "cuda"),
        ("cuda", "cuda:1", 1, "cuda:1"),
        ("cuda", "cpu", 2, "cpu"),
        ("mps", "auto", 1, "mps"),
        ("mps", "auto", 2, "cpu"),
        ("mps", "mps", 2, "mps"),
        ("npu", "auto:1", 1, "npu:1"),
        (None, "auto:1", 1, "auto:1"),
    ],
)
def test_a_job_s_word_for_a_device(monkeypatch, found, wanted, processes, meant):
    answer = found and SimpleNamespace(type=found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: answer)
    assert devices.device_kind(wanted, processes) == meant


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cpu:0", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)])
def test_only_an_accelerator_is_waited_for(monkeypatch, device, waits):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    devices.wait_for(device)
    assert len(waited) == waits
