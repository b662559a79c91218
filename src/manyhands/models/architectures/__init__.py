"""One file per family: `names()` lists the words users write, `needs(…)` what pictures suit, `build(…)` makes it."""
