"""One file for each format of a file that describes a cluster, and each launcher; none imports another.

What a file may have:

- `recognise(path, text) -> bool`: whether a file is in this format, by its name and its text alone.
- `read(text, where) -> Cluster`: strict; a mistake is a `UserError` that names file, field, line, found and expected.
- `wait(path, timeout_s) -> str`: the text of a file that another program may still be writing.
- `write(cluster) -> (text, notes)`: the file, and what of the cluster it has no place for; a cluster that the format
  can't describe is refused with a `UserError`.
- `place(environment) -> LauncherPlace | None`: the process that a launcher's variables say this is; None without them.
- `PRECEDENCE`: among several with a place, the lowest number is followed; 0 where it isn't there.
- `from_environment(environment) -> Cluster | None`: the cluster that a launcher's variables describe as a whole.
- `alone(environment) -> UserError | None`: what is wrong where this is one process of a job with several.
- `script(submission) -> str` or `manifest(submission) -> str`: what a scheduler takes.
"""
