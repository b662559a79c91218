"""The commands. Each parses flags, calls a function of `run` and prints. Imports that --help doesn't need are local."""
