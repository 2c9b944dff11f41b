"""Process groups across replica groups: made anew for each quorum, aborted in milliseconds."""

from __future__ import annotations

from ftcore.process_group.base import Group
from ftcore.process_group.errors import (
    CollectiveFailed,
    GroupAborted,
    GroupError,
    GroupNotBuilt,
)
from ftcore.process_group.gloo import GlooGroup
from ftcore.process_group.store import HostedStore, host_store
from ftcore.process_group.work import GroupWork

__all__ = [
    "CollectiveFailed",
    "GlooGroup",
    "Group",
    "GroupAborted",
    "GroupError",
    "GroupNotBuilt",
    "GroupWork",
    "HostedStore",
    "host_store",
]
