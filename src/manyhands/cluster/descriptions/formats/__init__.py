"""One file for each outside description of a cluster, or launcher; none imports another.

What a file may have:

- `NAMES`: the words that users write for it, as in `convert-cluster --to NAME`.
- `recognise(path, text) -> bool`: whether a file is in this format, by its name and its text alone.
- `read(text, where) -> Cluster`: strict; a mistake is a `UserError` that names file, field, line, found and expected.
- `wait(path, timeout_s) -> str`: the text of a file that another program may still be writing.
- `HAS_SSH_PORTS = True`: it can hold a port of ssh for each machine.
- `write(cluster) -> str`: with `read(write(cluster), "") == cluster` for every cluster that the format can hold;
  one that it can't hold is refused with a `UserError`.
- `fit(cluster) -> (cluster, notes)`: the nearest cluster that `write` can hold, and in words what was left out of it;
  without it `convert-cluster` writes a cluster as it is, or not at all.
- `place(environment) -> LauncherPlace | None`: the process that a launcher's variables say this is; None without them.
- `PRECEDENCE`: among several with a place, the lowest number is followed; 0 where it isn't there.
- `from_environment(environment) -> Cluster | None`: the cluster that a launcher's variables describe as a whole.
- `alone(environment) -> UserError | None`: what is wrong where this is one process of a job with several.
- `script(submission) -> str` or `manifest(submission) -> str`: what a scheduler takes.
"""
