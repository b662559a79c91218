"""One file per kind of op: which ops it is for, and what each letter means to them.

A file exposes `KIND`, `matches(op)` and `describe(op, inputs)`, which fills in `op.letters` (and `feature`, `views`),
and maybe `local(op, letters, grid)`: a module that does the op's work on this process's piece.
"""
