"""Examines a job's machines and reports problems, without changes. `cluster.agents` connects to other machines."""
