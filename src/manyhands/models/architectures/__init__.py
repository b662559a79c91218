"""One module per family of networks. Its `NAMES` are values of model.name, and its `build` builds a network."""
