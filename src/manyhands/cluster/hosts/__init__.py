"""Reads hosts from files and from launchers' environments into one inventory. Contacts no host."""
