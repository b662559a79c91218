"""The training loop of a worker: combines data, model, parallel mode, sync method and checkpoints.

Read `loop.py` first: it is the order of events of a whole run.
"""
