"""One module per family of networks: `NAMES` has values of model.name, `build(…)` builds a network."""
