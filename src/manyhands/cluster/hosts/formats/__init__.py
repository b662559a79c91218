"""Cluster file formats and launchers, one module each; no module imports another.

A module may define:

- `recognize(path, text) -> bool`: True if the name and the text of a file match the format.
- `read(text, where) -> Cluster`: parses a file strictly. Raises `UserError` with the file and the wrong value.
- `wait(path, timeout_s) -> str`: waits for a file that another program is writing, and returns its text.
- `write(cluster) -> (text, notes)`: formats a cluster, with notes on unsupported values. Raises `UserError`.
- `place(environment) -> LauncherPlace | None`: reads this process's rank and rank 0's address from variables.
- `PRECEDENCE`: order of the launchers; the lowest number wins. The default is 0.
- `from_environment(environment) -> Cluster | None`: reads the entire cluster from a launcher's variables.
- `missing_launcher_error(environment) -> UserError | None`: the error for a process started without the launcher.
- `script(submission) -> str` or `manifest(submission) -> str`: formats a job file for a scheduler.
"""
