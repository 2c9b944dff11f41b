"""Asynchronous sharded checkpoints that cannot be torn."""
