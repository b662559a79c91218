"""Saves a run's state atomically and loads it; reads tensors and plain data, never pickled objects."""
