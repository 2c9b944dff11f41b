"""The manager process: one per replica group, beside its ranks, never in their way. No torch."""
