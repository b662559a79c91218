"""The [model] section of a job."""

from typing import Any

from pydantic import Field

from manyhands.core.options import Options, option


class ModelOptions(Options):
    """Options of the network."""

    name: str = option(
        "cnn", "name of a network (mlp, cnn, resnet18 …), torchvision:NAME, or file.py:object for a network of your own"
    )
    pretrained: bool = option(False, "start from the pretrained weights that torchvision publishes")
    weights: str = option("", "file of weights to start from (.safetensors, .pth, .pth.tar)")
    num_classes: int = option(0, "number of outputs; 0: the number of classes in the data", ge=0)
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="additional keyword arguments for the network's constructor"
    )
