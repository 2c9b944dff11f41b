"""Pure decisions of the manager: no clock, no network."""
