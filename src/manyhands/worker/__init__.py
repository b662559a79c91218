"""The code of worker processes and of commands that need torch; the launcher imports it only within functions."""
