"""The quorum server: it says who takes the next step together."""
