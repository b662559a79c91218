"""A launcher and the agents of its machines: messages, and how workers are started, supervised and ended."""
