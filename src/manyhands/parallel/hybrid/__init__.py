"""Networks that their author has sharded."""
