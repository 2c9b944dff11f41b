"""What can go wrong in a replica group, and what to do."""

from __future__ import annotations

from ftcore.base.errors import FtError


class GroupStopped(FtError):
    """The manager or the lighthouse says that this replica group cannot go on."""

    remedy = "Restart the replica group."


class ManagerLost(FtError):
    remedy = (
        "The manager process of this replica group is gone: look for its last lines in this "
        "group's log, then restart the group. The other groups go on meanwhile."
    )


class ManagerNotStarted(FtError):
    remedy = "Look at the lines above; the manager is `python -m ftcore.daemon`."


class StepNotIterated(FtError):
    remedy = (
        "Run `for shard in step:` to its end in each step; what commits the step is the end of "
        "that loop."
    )


class NothingToReduce(FtError):
    remedy = "Pass the model to ftcore.Manager, with parameters that require gradients."
