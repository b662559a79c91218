"""One file per data set: `NAMES` lists the words users write, `open(options)` returns its splits."""
