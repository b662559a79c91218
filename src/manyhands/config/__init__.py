"""The job: a typed tree of options, loaded from flags, environment, job.toml, recipe and defaults."""
