"""Gradient synchronization between data-parallel replicas."""
