"""Files and launchers' environments that list hosts, read into one inventory.

Not here: anything that talks to another machine or starts a process.
"""
