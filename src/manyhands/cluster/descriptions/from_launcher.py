"""Asks every launcher's format whether its variables say which process this is."""

from collections.abc import Iterator, Mapping
from types import ModuleType

from manyhands.cluster.descriptions import formats
from manyhands.cluster.descriptions.inventory import Cluster, LauncherPlace
from manyhands.core.errors import UserError
from manyhands.core.plugins import load_choice, module_names


def modules_with(function: str) -> Iterator[ModuleType]:
    """The formats that have a function; those that know this process more closely come first."""
    found = [load_choice(formats.__name__, name) for name in module_names(formats.__name__)]
    yield from sorted(
        (module for module in found if hasattr(module, function)), key=lambda module: getattr(module, "PRECEDENCE", 0)
    )


def find_place(variables: Mapping[str, str]) -> LauncherPlace | None:
    """This process's place by the first launcher that has variables here. Raises UserError: they aren't whole."""
    return next((place for module in modules_with("place") if (place := module.place(variables))), None)


def other_places(variables: Mapping[str, str], chosen: tuple[int, int]) -> list[str]:
    """What other launchers' variables say, where it differs from the chosen rank and size."""
    differing: list[str] = []
    for module in modules_with("place"):
        try:
            place: LauncherPlace | None = module.place(variables)
        except UserError:
            continue  # a launcher that isn't followed may be incomplete
        if place and (place.rank, place.size) != chosen:
            rank, size = place.origins.get("rank", "rank"), place.origins.get("size", "size")
            differing.append(f"{place.started_by}: {rank} {place.rank}, {size} {place.size}")
    return differing


def described_cluster(variables: Mapping[str, str]) -> Cluster | None:
    """The cluster that a launcher's variables describe as a whole, with this machine in it, such as Kubeflow's."""
    for module in modules_with("from_environment"):
        cluster: Cluster | None = module.from_environment(variables)
        if cluster:
            return cluster
    return None


def refuse_alone(variables: Mapping[str, str]) -> None:
    """Raises UserError where a scheduler's job has several processes, and this one was started by itself."""
    for module in modules_with("alone"):
        error: UserError | None = module.alone(variables)
        if error:
            raise error
