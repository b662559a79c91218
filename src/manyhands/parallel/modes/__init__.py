"""One file for each parallel mode; the word that users write is the file's name. None imports another.

What a file has:

- `DESCRIPTION`: what it does, in a few words.
- `NORM_GROUPS`: whether BatchNorm's groups can be the same at any number of processes.
- `OFFERS`: what sync methods find under it, of `core/needs.py`; without anything it averages gradients by itself.
- `apply(model, world, request) -> ParallelNetwork`: has the network run.

What it may have:

- `FOLLOWS_PLAN = True`: it splits ops by a plan, which it is given as `request.plan`.
- `TAKES_MESH = True`: the network's author splits it, so that it is constructed with the mesh, `request.grid`.
- `ONE_PROCESS`: what it is, where it isn't for several processes: "one process".
- `NOTHING_ALONE = True`: one process alone runs the network as it is.
"""
