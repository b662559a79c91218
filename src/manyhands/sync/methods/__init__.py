"""One file per way of agreeing; the word that users write is the file's name."""
