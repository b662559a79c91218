"""Both sides of supervision, launcher and agents: messages, and the start, watch and end of workers."""
