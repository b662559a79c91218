"""The worker: the only place where data, model, parallel mode, sync and checkpoint meet.

Read `loop.py` first: it is the order of events of a whole run.
"""
