"""One module per family of networks. `NAMES` lists its values of model.name; `build(…)` builds a network."""
