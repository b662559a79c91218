"""Samples in, pixels out. Knows (rank, size) only as two integers, and nothing of models."""
