"""One module for each sync method, named like the value of sync.method. No module imports another.

A module defines:

- `DESCRIPTION`: a short description for users.
- `EXACT`: True if the updates equal those of one process, up to the order of sums.
- `NEEDS`: the requirements of the method (`core/needs.py`); empty if the parallel mode does all the work.
- `estimate(case, options) -> list[Cost]`: the estimated cost of each variant of the method.
- `make(network, context, options, cost) -> Synchronizer`: builds the synchronizer. A collective. See
  `sync/synchronizer.py`.

A module may define:

- `Options`: a class with the options of the method, which become part of the section `sync` of the job.
- `EXCEPTION`: a sentence for plan.json on how results depend on the number of processes, if not `EXACT`.
- `PRECEDENCE`: `auto` prefers the method with the lowest value; a method without a value comes last.
- `EVERY_UPDATE = False`: processes don't synchronize in every update. The module then defines two more functions:
  `requested_cost(options)` returns the `Cost` with the interval that the options fix, or None if it depends on the link, and
  raises UserError if options contradict each other. `allows_cost(cost, options)` returns True if the options allow the
  interval of an earlier start of the run.

A job is read without torch, so a module imports code that needs torch only within its functions.
"""
