"""What can go wrong with a lease, and what the operator does about it."""

from __future__ import annotations

from ftcore.base.errors import BadSetting, FtError


class LeaseLost(FtError):
    """Somebody else holds the lease, or nobody does. Whoever sees this stops leading at once."""

    remedy = (
        "Nothing is broken: this lighthouse became a follower and the new leader answers. If it "
        "happens often, raise --lease-ttl or give the lease store and the lighthouse more CPU."
    )


class LeaseUnreachable(FtError):
    """The lease store did not answer in time or refused for a reason that may pass."""

    remedy = (
        "Check that the lease store is up and reachable from this machine (etcd: `etcdctl endpoint "
        "health`; file: free space and permissions; Kubernetes: the service account's role)."
    )
    retryable = True


class RecordTooLarge(FtError):
    """A job's durable record does not fit into the lease store."""

    remedy = (
        "Use fewer or shorter replica ids, serve fewer jobs with this lighthouse, or use an etcd "
        "lease, which holds 1 MiB a job."
    )


class BadLease(BadSetting):
    """`--lease` names no lease that can be used."""

    remedy = (
        "Use one of: memory, file:/shared/dir, etcd:HOST:PORT,HOST:PORT[/PREFIX], "
        "kubernetes:NAMESPACE/NAME."
    )
