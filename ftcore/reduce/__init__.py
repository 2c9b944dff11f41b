"""Reduce gradients across replica groups: exactly (the same bits for any deal) or fast."""
