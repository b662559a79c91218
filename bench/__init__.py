"""Measurements side by side with other tools. Nothing here is a test: no time ever fails."""
