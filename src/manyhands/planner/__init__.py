"""Selects a parallel plan before training, and explains the choice."""
