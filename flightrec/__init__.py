"""Reads flight-recorder dumps and names the guilty rank."""
