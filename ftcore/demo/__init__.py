"""The demo: kill a group of a real training run, and end with the same bits."""
