"""One module per kind of data set, with `NAMES` (its values of data.name) and `open(name, options) -> Splits`."""
