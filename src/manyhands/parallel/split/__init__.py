"""Sharding of a network by a plan: tracing, sharding rules of ops, strategies, execution."""
