"""Where checkpoints lie: files, memory, S3, and whatever fsspec opens. `open_store(url)` picks."""
