"""One file per data set: `NAMES` lists the words users write, `open(name, options)` returns its splits."""
