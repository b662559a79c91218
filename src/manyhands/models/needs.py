"""What a network asks of its pictures."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelNeeds:
    """What pictures must be like, and what the user should know of the choice."""

    channels: int | None = None  # 1 or 3; None where any number will do
    # height and width in pixels to which pictures must be brought; None where they can stay as they are
    size: int | None = None
    notes: list[str] = field(default_factory=list)  # sentences for the user
