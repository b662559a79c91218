"""One file per parallel mode: `apply(...)` makes the network run that way over the world."""
