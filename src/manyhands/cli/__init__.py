"""Commands: each parses its flags, calls one function of `run` and prints. Imports for more than --help are local."""
