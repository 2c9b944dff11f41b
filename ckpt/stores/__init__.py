"""Where checkpoints lie: files, memory, S3, and whatever fsspec opens. `open_store(url)` picks."""

from ckpt.stores.base import Capabilities, Limits, ObjectInfo, Outcome, Read, Store, Upload
from ckpt.stores.opening import open_store

__all__ = [
    "Capabilities",
    "Limits",
    "ObjectInfo",
    "Outcome",
    "Read",
    "Store",
    "Upload",
    "open_store",
]
