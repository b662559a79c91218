"""The answer to --show-config."""

from manyhands.config.load import LoadedJob, known_keys
from manyhands.core.terminal import as_json, show


def print_config(loaded: LoadedJob) -> None:
    """Every value of the job and where it came from, as TOML with comments."""
    values = loaded.job.model_dump(mode="json")
    section = ""
    for key in known_keys():
        name, _, option = key.partition(".")
        if name != section:
            show(f"{'' if not section else chr(10)}[{name}]")
            section = name
        line = f"{option} = {as_json(values[name][option])}"
        show(f"{line:<40} # {loaded.origins.get(key, 'default')}")
