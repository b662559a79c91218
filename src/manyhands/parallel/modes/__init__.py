"""One module for each parallel mode, named like the value of parallel.mode. No module imports another.

A module defines:

- `NORM_GROUPS`: True if BatchNorm groups don't depend on the number of processes.
- `OFFERS`: the requirements of sync methods (`core/needs.py`) that the mode meets; empty: only the mode averages.
- `apply(model, world, request) -> ParallelNetwork`: wraps the network for this mode.

A module may define:

- `FOLLOWS_PLAN = True`: the mode shards ops by the plan in `request.plan`.
- `TAKES_MESH = True`: the network shards itself and is constructed with the mesh, `request.grid`.
- `ONE_PROCESS`: a description such as "one process", for a mode that doesn't support several processes.
- `NOTHING_ALONE = True`: with one process, the mode has no effect.
"""
