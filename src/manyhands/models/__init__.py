"""Networks for one device, independent of ranks."""
