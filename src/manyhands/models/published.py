"""Names of networks, read from source files, because importing torch or torchvision is too slow for `--help`."""

import re
from importlib.util import find_spec
from pathlib import Path

from manyhands.core.errors import UserError

CHOICES = "manyhands.models.architectures"

# Each network is a function below this decorator and others, whose arguments may fill several lines.
_BUILDER = re.compile(r"^@register_model\(\)\n(?:@.*\n(?:[ )].*\n)*)*def (\w+)\(", re.MULTILINE)


def published_names() -> list[str]:
    """Returns the names of torchvision's classification networks, or [] if torchvision isn't installed."""
    found = find_spec("torchvision")
    if found is None or not found.origin:
        return []
    files = (Path(found.origin).parent / "models").glob("*.py")
    return sorted(name for file in files for name in _BUILDER.findall(file.read_text(encoding="utf-8")))


def check_network(wanted: str, *, pretrained: bool) -> None:
    """Raises UserError if a network is unknown, or if `pretrained` weights aren't published. Imports no torch."""
    from manyhands.core.choices import module_names, read_choice, unknown_choice_error  # slow; not needed for --help
    from manyhands.core.user_code import is_object_reference

    known, published, prefix = set[str](), set[str](), f"{wanted.partition(':')[0]}:"
    choices = [read_choice(CHOICES, word) for word in module_names(CHOICES)]
    of_prefix = [choice for choice in choices if choice.get("PREFIX") == prefix]
    for choice in of_prefix or choices:
        names = choice["NAMES"] or (published_names() if choice.get("TORCHVISION") else None)
        if not names:  # the later import of the file reports a missing torchvision
            return
        words = {prefix + name if of_prefix else name for name in names}
        known |= words
        published |= words if "build_pretrained" in choice else set()
    if not is_object_reference(wanted) and wanted not in known:
        raise unknown_choice_error("network", wanted, known, "model.name")
    if pretrained and wanted not in published:
        raise no_weights_error(wanted)


def no_weights_error(name: str) -> UserError:
    hints = ("remove model.pretrained, or choose one of torchvision's networks",)
    return UserError(f"{name} has no published weights", "model.pretrained", hints)
