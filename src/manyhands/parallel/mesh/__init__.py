"""A mesh of processes: axes, placements of tensors, and sums of gradients over axes."""
