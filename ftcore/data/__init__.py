"""Which samples a step takes: exactly once per epoch, whatever dies, joins or is repeated.

`order`, `ledger` and `seeds` are pure and import no torch; the rest is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ftcore.data.errors import DataOrderDiffers
from ftcore.data.ledger import Batches, EpochEnd, Ledger, deal, owned_by
from ftcore.data.order import Permutation
from ftcore.data.seeds import seed_for

if TYPE_CHECKING:
    from ftcore.data.loader import ElasticLoader, ShardBatch
    from ftcore.data.replay import ReplayShards
    from ftcore.data.rng import shard_rng
    from ftcore.data.sampler import ElasticBatchSampler, ElasticSampler

_HOMES = {
    "ElasticBatchSampler": "ftcore.data.sampler",
    "ElasticLoader": "ftcore.data.loader",
    "ElasticSampler": "ftcore.data.sampler",
    "ReplayShards": "ftcore.data.replay",
    "ShardBatch": "ftcore.data.loader",
    "shard_rng": "ftcore.data.rng",
}

__all__ = [
    "Batches",
    "DataOrderDiffers",
    "ElasticBatchSampler",
    "ElasticLoader",
    "ElasticSampler",
    "EpochEnd",
    "Ledger",
    "Permutation",
    "ReplayShards",
    "ShardBatch",
    "deal",
    "owned_by",
    "seed_for",
    "shard_rng",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftcore.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
