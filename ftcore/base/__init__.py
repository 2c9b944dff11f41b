"""Shared by all packages: errors, command lines, logs, metrics, back-off. No torch."""
