"""manyhands schema."""


def schema() -> int:
    """Print the JSON Schema of job.toml, for editors."""
    import json

    from manyhands.config.job import Job
    from manyhands.core.terminal import show

    show(json.dumps(Job.model_json_schema(), indent=1))
    return 0
