"""What is found out about machines, and what is said about it.

Not here: how machines are reached and asked (`agents`), and anything that changes one of them.
"""
