"""The training loop of each process: data, model, parallel mode, sync method, checkpoints. Read `loop.py` first."""
