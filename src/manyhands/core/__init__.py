"""Code that several packages share; imports no other package of manyhands, and only `devices` imports torch."""
