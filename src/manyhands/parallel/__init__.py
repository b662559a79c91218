"""Parallel modes, the process group and its collectives."""
