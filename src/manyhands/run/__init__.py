"""The head's programs and the Python interface, around the run folder; no module here imports torch.

`train` starts and watches, `task` has processes do something short, `python` is the interface for scripts. What
computes with tensors is in `manyhands.worker`, and comes through `load` once it is needed.
"""
