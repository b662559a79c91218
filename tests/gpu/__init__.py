"""What must hold on an accelerator: run by `make test-gpu`, without a network, with the Python and torch there."""
