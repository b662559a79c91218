"""The head's programs and the Python interface, around the run folder; no module here imports torch at its top."""
