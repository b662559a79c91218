"""The job: one typed tree of options, loaded from flags, environment, file and recipe, with origins."""
