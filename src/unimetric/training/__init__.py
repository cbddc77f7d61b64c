"""The training loop, and everything that a step needs."""
