"""The launcher's and the agents' code that starts, supervises and ends workers, and the messages between them."""
