"""Code that several packages share. Imports no other package of manyhands; only `core.devices` imports torch."""
