"""The head and its machines: how they talk, and how workers are started, watched and ended.

Not here: what a file or a launcher says of machines (`hosts`), and what may be wrong with them (`doctor`).
Only `elastic` may import torch.
"""
