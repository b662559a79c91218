"""One module per family: `NAMES` has the values of model.name, `build(…)` builds one of them."""
