"""Data sets, the order of samples, decoding and augmentation. Imports no models and no process groups."""
