"""Costs of collectives along the axes of a mesh, whose axes lie within machines or between them."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

from manyhands.core.mesh import Mesh
from manyhands.sync.link_speeds import (
    BETWEEN_MACHINES,
    WITHIN_A_MACHINE,
    LinkSpeed,
    link_seconds,
    sent_bytes,
    work_seconds,
)


@dataclass(frozen=True)
class LinkSpeeds:
    """The links along the axes of a mesh."""

    mesh: Mesh  # the processes
    axes: tuple[LinkSpeed, ...]  # the link along each axis
    across: tuple[bool, ...]  # for each axis, True if it connects machines

    @functools.cached_property
    def alike(self) -> bool:
        """True if all axes have the same link."""
        return len(set(zip(self.axes, self.across, strict=True))) <= 1

    def seconds(self, kind: str, axes: Collection[int], size_bytes: float) -> float:
        """Returns the seconds of a collective in all groups along some axes at the same time.

        A group over several axes is as slow as its slowest axis. Groups of one machine share its network card: there
        are as many groups as processes along the other axes within a machine.
        """
        axes = tuple(sorted(axes))
        processes = self.mesh.parts(axes)
        if processes == 1 or not size_bytes:
            return 0.0
        beside = self.mesh.parts(axis for axis, far in enumerate(self.across) if axis not in axes and not far)
        slowest = 0.0
        for axis in axes:
            link = self.axes[axis]
            if self.across[axis]:
                link = replace(link, bytes_per_s=link.bytes_per_s / beside)
            if self.mesh.sizes[axis] > 1:
                slowest = max(slowest, link_seconds(kind, processes, size_bytes, link))
        return slowest

    def work_seconds(self, kind: str, axes: Collection[int], size_bytes: float) -> float:
        """Returns the seconds of a collective in which the cores of a process can't compute."""
        processes = self.mesh.parts(axes)
        if processes == 1 or not size_bytes:
            return 0.0
        return max(work_seconds(kind, processes, size_bytes, self.axes[axis]) for axis in axes)

    def sent_bytes(self, kind: str, axes: Collection[int], size_bytes: float) -> float:
        """Returns the bytes that a process sends in a collective."""
        return sent_bytes(kind, self.mesh.parts(axes), size_bytes)


def links_of(
    mesh: Mesh,
    per_machine: int | None = None,
    within: LinkSpeed = WITHIN_A_MACHINE,
    between: LinkSpeed = BETWEEN_MACHINES,
) -> LinkSpeeds:
    """Returns the links of a mesh whose minor axes lie within machines as far as they fit.

    Args:
        mesh: the processes; neighbours in rank share a machine.
        per_machine: processes of a machine; all of them if None.
        within: the link between processes of a machine.
        between: the link between machines.
    """
    across: list[bool] = []
    spanned = 1
    for size in reversed(mesh.sizes):
        spanned *= size
        across.append(per_machine is not None and size > 1 and (spanned > per_machine or per_machine % spanned != 0))
    across.reverse()
    return LinkSpeeds(mesh, tuple(between if far else within for far in across), tuple(across))
