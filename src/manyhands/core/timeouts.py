"""Time limits."""

MAKE_WAY_S = 90.0
