"""The [model] section of a job."""

from typing import Any

from pydantic import Field

from manyhands.core.options import Options


class ModelOptions(Options):
    """The network."""

    name: str = Field(default="cnn", description="mlp, cnn, resnet18 …, torchvision:NAME, or file.py:object")
    pretrained: bool = Field(default=False, description="start from torchvision's published weights")
    weights: str = Field(default="", description="start from the weights in this file (.safetensors, .pth, .pth.tar)")
    num_classes: int = Field(default=0, ge=0, description="number of outputs; 0: the number of classes in the data")
    arguments: dict[str, Any] = Field(default_factory=dict, description="more arguments for the network's constructor")
