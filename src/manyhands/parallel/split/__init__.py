"""Splitting a network by a plan: tracing, rules of ops, strategies, execution."""
