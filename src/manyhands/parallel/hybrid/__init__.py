"""Networks that are sharded by hand."""
