"""Joining the processes of a run: rendezvous, ports, tunnels, failure reports, and collectives of JSON data."""
