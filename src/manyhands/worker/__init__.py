"""Code of worker processes and of commands that need torch. The launcher imports this package only within functions."""
