"""Examines a job's machines and reports problems, without changes. `agents` connects to other machines."""
