"""How the proof works that a network which its author has split is right; `parallel/verify.py` is the way in."""
