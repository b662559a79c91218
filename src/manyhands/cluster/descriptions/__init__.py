"""What files, commands and launchers' variables say of machines, read into one inventory and written from it.

Not here: anything that talks to another machine or starts a process; a description is text.
"""
