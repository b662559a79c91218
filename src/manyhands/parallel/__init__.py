"""Where tensors live: the group of processes, its collectives, and one file per parallel mode."""
