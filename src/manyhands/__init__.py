"""manyhands: train an image classifier on one laptop or many machines, with one command."""

__version__ = "0.1.0"
