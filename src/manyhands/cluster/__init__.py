"""From machines to started and supervised processes. Only `agent` may import torch."""
