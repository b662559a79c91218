"""What must be equal on all processes of a run, in words that can be compared by option."""

import hashlib
import json
from typing import Any

from manyhands.config.job import ClusterOptions, Job
from manyhands.config.load import flatten
from manyhands.core.version import __version__

# Of the cluster's options, those that all processes must agree in. Where they meet is not one of them: rank 0 may call
# it 0.0.0.0, a name, or another of its addresses; and who meets compares the world's size.
SHARED = {"backend"}


def shared_options(job: Job) -> str:
    """The job but for who takes part where, and the version: words such as "train.epochs=3", with spaces between.

    Numbers are written out; of other values there is a digest, since they may name what is nobody else's business.
    """
    own = {
        "cluster": set(ClusterOptions.model_fields) - SHARED,
        "data": {"workers", "machine_workers"},
        "run": {"out", "report"},
        "checkpoint": {"resume"},
    }
    options = {"manyhands": __version__, **flatten(job.model_dump(mode="json", exclude=own))}
    return " ".join(f"{key}={_word(value)}" for key, value in options.items())


def _word(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if isinstance(value, int | float) else hashlib.sha256(text.encode()).hexdigest()[:12]
