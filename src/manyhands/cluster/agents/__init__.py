"""Starts and supervises workers: the launcher, an agent process on each machine, and the messages between both."""
