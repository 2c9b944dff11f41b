"""What can be wrong with a checkpoint that somebody else wrote."""

from __future__ import annotations

from ckpt.errors import CheckpointError


class ForeignFormat(CheckpointError):
    """A file of another format cannot be read, or holds what we never load."""

    remedy = (
        "Give the directory with `.metadata` (torch.distributed.checkpoint) or with *.safetensors. "
        "Objects other than tensors and plain values are never loaded: save them as plain values."
    )
