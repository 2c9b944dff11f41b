"""Messages between trainers, managers and the lighthouse. No torch."""
