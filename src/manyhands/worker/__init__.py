"""What one process of a run does, and all that computes with tensors for a command.

`entry` joins, does and leaves; `plan_*` search, show and try plans. The head imports nothing of this package at its
start: it comes through `run.load`, and with it torch.
"""
