"""One module per kind of data set: `NAMES` lists values of data.name, `open(name, options)` returns the splits."""
