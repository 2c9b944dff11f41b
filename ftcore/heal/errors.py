"""What can go wrong while state moves from one group to another."""

from __future__ import annotations

from ftcore.base.errors import FtError


class HealFailed(FtError):
    """No source could deliver all of the state. `is_torn` says whether `into` was written to."""

    remedy = (
        "Ask for a new quorum and heal again from its sources; do not train on or serve this state "
        "when the heal was in place."
    )
    retryable = True
    is_torn = False


class OfferRefused(FtError):
    """The source serves another step or quorum, or does not know this reader's token."""

    remedy = "Take the offer from the newest quorum: the one used here is over."
    retryable = True


class SourceLost(FtError):
    """A source closed its connection, fell silent, or sent damaged bytes again and again."""

    remedy = "Look at the log of the source; the heal goes on from the others by itself."
    retryable = True


class FrameInvalid(FtError):
    """Bytes that should be a message of the heal protocol are not."""

    remedy = "Check that the address is that of a heal server of the same version of ftcore."
