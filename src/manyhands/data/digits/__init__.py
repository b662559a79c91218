"""The digits' files and where they come from (SOURCE.md); no code."""
