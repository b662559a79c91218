"""Composes the four programs around the run folder: what the command line and the Python interface call.

`train` starts and watches; `worker` is what each process does; `inspect` evaluates and predicts with a finished run.
"""
