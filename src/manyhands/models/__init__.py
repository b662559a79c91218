"""Networks, built for one device without knowledge of ranks."""
