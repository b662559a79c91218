"""What one process of a run does, and all that computes with tensors for a command.

`entry` joins, does and leaves; `plan_*` search, show and try plans. The launcher imports this package, and with it
torch, within functions only.
"""
