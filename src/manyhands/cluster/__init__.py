"""From machines to started and supervised processes: who they are, whether they are well, what runs on them."""
