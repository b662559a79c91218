import pytest
import torch
from torchvision.models import regnet


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch):
    """The meta device, on which a network has shapes but no numbers; RegNet computes its widths with tensors."""
    real = regnet.BlockParams.from_init_params

    def on_cpu(*arguments, **options):
        with torch.device("cpu"):
            return real(*arguments, **options)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", on_cpu)
    with torch.device("meta"):
        yield
