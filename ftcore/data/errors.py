"""What can be wrong with the position in the data."""

from __future__ import annotations

from ftcore.base.errors import FtError


class DataOrderDiffers(FtError):
    """A position was made with another seed, size or number of shards than it is loaded into."""

    remedy = (
        "Start with the seed, data set and shards that the position was made with, or begin the "
        "data anew with a fresh ledger."
    )
