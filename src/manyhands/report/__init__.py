"""Reads run folders, and displays runs on the screen and in reports. Imports no torch."""
