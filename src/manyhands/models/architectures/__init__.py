"""One module per family of networks: its `NAMES` are values of model.name, and its `build(…)` builds a network."""
