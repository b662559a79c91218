"""One file per command: it parses, calls one function of `run`, and prints.

At the top of a file stands only what a page of help needs; what the command works with is imported where it is used.
"""
