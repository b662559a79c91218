"""Displays runs from their run folders. Imports no torch."""
