"""What can go wrong in a process group across replica groups."""

from __future__ import annotations

from ftcore.base.errors import FtError


class GroupError(FtError):
    """Base of every failure of a group. The group stays unusable until the next configure()."""

    remedy = (
        "Vote against this step, ask for the next quorum, call configure() with its members and "
        "repeat the step; the manager does so by itself."
    )
    retryable = True


class GroupAborted(GroupError):
    """Someone called abort() while this collective ran, or before it was issued."""


class CollectiveFailed(GroupError):
    """The network under a collective broke or timed out: a peer is dead, stuck or cut off."""


class GroupNotBuilt(GroupError):
    """configure() could not reach the store or a peer."""

    remedy = (
        "A member of this quorum died or cannot reach the store: ask for the next quorum. If it "
        "happens each time, check that the address named above is reachable from this machine."
    )


class GroupNotConfigured(FtError):
    """A collective before the first configure()."""

    remedy = "Call configure() with a quorum's store address, prefix, rank and world size first."


class GroupMisused(FtError):
    """A call that can never work in this group."""

    remedy = "Correct the argument named above; nothing was sent and the group is still usable."
