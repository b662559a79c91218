"""The commands, by subject: each parses its flags, calls one function of `run`, and prints.

At the top of a file stands only what a page of help needs; what a command works with is imported where it is used.
"""
