"""The launcher's commands and the Python interface; no module here imports torch when it is imported."""
