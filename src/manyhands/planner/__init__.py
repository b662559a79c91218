"""Selects a plan, which says how ops are sharded, before training, and explains the choice."""
