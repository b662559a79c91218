"""One file for each way of agreeing; the word that users write is the file's name. None imports another.

What a file has:

- `DESCRIPTION`: what it does, in a few words.
- `EXACT`: whether processes make the updates that one would make, but for the order of sums.
- `NEEDS`: what it can't do without, of `core/needs.py`; empty where the parallel mode does it all.
- `estimate(case, options) -> list[Cost]`: what it costs; one for each way in which it may be taken.
- `make(network, context, options, cost) -> Synchronizer`: builds it; a collective. See `sync/synchronizer.py`.

What it may have:

- `Options`: its own options, a class of pydantic fields. They are part of the job's section `sync`.
- `EXCEPTION`: for plan.json, how results depend on the number of processes, where it isn't exact.
- `PRECEDENCE`: among methods that are about equally fast `auto` takes the lowest number; without it the last.
- `EVERY_UPDATE = False`: processes agree now and then. Then it has two functions besides: `asked(options)` gives the
  `Cost` with the pace that the options name whole, or None where the link decides; it refuses options that contradict
  each other. `fits(cost, options)` says whether a pace that was decided before is one that the options allow.

The job is read where torch isn't imported, so a file imports what needs torch within its functions.
"""
