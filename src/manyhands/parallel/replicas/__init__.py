"""Replicas: sums through shared memory, and BatchNorm over groups of the global batch."""
