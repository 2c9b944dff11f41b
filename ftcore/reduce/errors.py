"""What can go wrong while gradients are reduced, apart from the network."""

from __future__ import annotations

from ftcore.base.errors import FtError


class BadDeal(FtError):
    """The shards given do not fit the deal of shards to ranks."""

    remedy = (
        "Give each rank exactly the shards that owner_of deals to it, each with the same number of "
        "elements; the manager's deal does so."
    )


class SparseGradient(FtError):
    """A parameter has a sparse gradient."""

    remedy = "Make the layer with sparse=False: sparse gradients cannot share a flat bucket."


class GradientAfterLaunch(FtError):
    """A gradient changed after its bucket was sent."""

    remedy = (
        "Arm the buckets with the number of backward passes that follow (microbatches of a "
        "pipeline, reentrant checkpoints) and scale by the weight, not by scale_grads of a "
        "schedule; or do not arm them: reduce_fast() then sends them at the end."
    )


class LayoutDiffers(FtError):
    """The parameters are not those that the buckets were made for."""

    remedy = "Make the buckets after the model has its final parameters, dtypes and device."
