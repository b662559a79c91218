"""When data-parallel replicas agree, and what they send."""
