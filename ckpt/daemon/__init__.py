"""The upload daemon: one per host, outlives trainers, holds their staged steps."""
