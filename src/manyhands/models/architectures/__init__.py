"""One file per family: `NAMES` (or `names()`) lists the words users write, `build(...)` makes the network."""
