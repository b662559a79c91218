"""manyhands: train an image classifier on one laptop or many machines, with one command."""
