"""One file per command: it parses, calls one function of `run`, and prints. No torch at import."""
