"""Examines machines and reports problems. Changes nothing; `agents` connects to other machines."""
