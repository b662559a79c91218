"""One module for each kind of op: the ops that it matches and the dimensions that can be sharded.

A module defines `KIND`, `matches(op)` and `describe(op, inputs)`, which sets `op.letters` (and `feature`, `views`), and
may define `local(op, letters, grid)`, which returns a module that computes the op on the shards of this process.
"""
