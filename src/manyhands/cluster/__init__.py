"""Finds the machines of a run, examines them, and starts and supervises worker processes on them."""
