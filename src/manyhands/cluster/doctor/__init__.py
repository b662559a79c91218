"""Examines machines and reports problems.

Not here: connections to other machines (`agents`), and anything that changes a machine.
"""
