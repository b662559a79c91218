"""Commands: each parses its flags, calls one function of `run` and prints. Top-level imports are those of --help."""
