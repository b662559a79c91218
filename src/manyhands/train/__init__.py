"""The training loop of a worker: data, model, parallel mode, sync method and checkpoints. Read `loop.py` first."""
