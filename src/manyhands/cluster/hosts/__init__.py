"""Files and launchers' environments that list hosts, read into one inventory. Starts and contacts nothing."""
