"""One module per family: `names()` lists values of model.name, `needs(…)` the supported pictures, `build(…)` builds."""
