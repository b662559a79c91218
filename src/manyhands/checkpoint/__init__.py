"""Saves and loads a run's state, all or nothing. Only tensors and plain data are read, never pickled objects."""
