"""Networks for one device. Nothing here knows of ranks."""
