"""What can go wrong in a lighthouse, and what to do."""

from __future__ import annotations

from ftcore.base.errors import FtError


class JournalUnwritable(FtError):
    remedy = (
        "Give --journal a path on a local disk that this user may write and that has free space; "
        "without --journal quorum ids are not kept across restarts."
    )


class JournalBroken(FtError):
    remedy = (
        "The file is not a lighthouse journal or was damaged in the middle: move it away. Running "
        "jobs go on, and the new lighthouse learns their quorums from them."
    )


class AddressInUse(FtError):
    remedy = "Stop what listens there, or choose another port with --bind HOST:PORT."


class Deposed(FtError):
    remedy = "Another lighthouse leads now; groups find it by themselves. Nothing is to be done."


class BadToken(FtError):
    """The client may have another one soon, so it tries again for a while."""

    remedy = "Give the job's token in FTCORE_TOKEN_FILE."


class StreamRefused(FtError):
    remedy = "Correct what the sentence names and start the replica group again."
