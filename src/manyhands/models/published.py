"""The names of torchvision's classifiers, read from its files, since importing it takes too long for a page of help."""

import re
from importlib.util import find_spec
from pathlib import Path

# Each is a function below this decorator and others, whose arguments may fill several lines.
_BUILDER = re.compile(r"^@register_model\(\)\n(?:@.*\n(?:[ )].*\n)*)*def (\w+)\(", re.MULTILINE)


def published_names() -> list[str]:
    """What `torchvision.models.list_models(module=torchvision.models)` lists; empty where it isn't installed."""
    found = find_spec("torchvision")
    if found is None or not found.origin:
        return []
    files = (Path(found.origin).parent / "models").glob("*.py")
    return sorted(name for file in files for name in _BUILDER.findall(file.read_text(encoding="utf-8")))
