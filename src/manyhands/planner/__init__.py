"""Decides how the work is split, before it starts, and says why."""
