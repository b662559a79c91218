"""Code of the launcher and of the agents that starts, supervises and ends workers, and the events between them."""
