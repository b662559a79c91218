"""Joining the processes of a run: rendezvous, ports, tunnels, failure reports and plain collectives."""
