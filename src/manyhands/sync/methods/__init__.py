"""One module for each sync method, named like the value of sync.method. No module imports another.

A module defines:

- `EXACT`: True if updates are those of a single process, up to the order of sums.
- `NEEDS`: the requirements of the method (`core/needs.py`). It is empty if the parallel mode does all the work.
- `estimate(case, options) -> list[Cost]`: the estimated cost of each variant of the method.
- `make(network, context, options, cost) -> Synchronizer`: builds the synchronizer (`sync/synchronizer.py`), with the
  interval of `cost` if it has one. A collective.

A module may define:

- `Options`: a class with the options of the method, which become part of the section `sync` of the job.
- `EXCEPTION`: if not `EXACT`, a sentence for plan.json on how results depend on the number of processes.
- `PRECEDENCE`: a number; `auto` prefers methods with lower numbers. Methods without a number come last.
- `EVERY_UPDATE = False`: processes don't synchronize in every update. The module then defines two more functions:
  `requested_cost(options)` returns a `Cost` with the interval that the options set, or None if it depends on the link.
  It raises UserError if options contradict each other. `allows_cost(cost, options)` returns True if the options allow
  the interval of `cost`, from an earlier start of the run.

A job is read without torch, so a module imports code that needs torch only within its functions.
"""
