"""Code that several packages share. Imports no other package of manyhands; only the module `devices` imports torch."""
