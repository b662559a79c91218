"""Commands: each parses its flags, calls one function of `run` and prints; top-level imports are those of --help."""
